/* The gradients of attention.cl: the weights are computed again, from the logarithm of each query's sum. Gradients lie as
   their tensors do. For those of keys and values lanes run along their rows. */

#include "attention_tiles.cl"

#define PADDED(count) (((count) + WIDTH - 1) / WIDTH * SIDES) /* vectors of a row of HEAD or VALUE */

/* to[query][column] = factor * from[query][column], with zeros after the last column. */
INLINE void copy_rows(vector *to, __global const float *from, int step, int columns, int count, float factor)
{
    for (int query = 0; query < count; ++query)
        for (int i = 0; i < PADDED(columns); ++i) {
            const int left = columns - i * TILE_LANES;
            const vector zero = 0.0f;
            const vector value = left > 0 ? load_vector(from + query * step + i * TILE_LANES, left) : zero;
            to[query * PADDED(columns) + i] = factor * value;
        }
}

/* to[row][column] += sum over i of a[row][i] right[i][column] for some rows and a vector for each side. */
INLINE void row_tile(
    const float *a, const vector *right, const int right_step, __global float *to, int step, int columns, int depth,
    int valid, const int rows)
{
    vector sum[HIGH][SIDES];
    int row[HIGH];
    UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows) {
        const int own = smaller(r, valid - 1);
        row[r] = own * QUERIES;
        UNROLL for (int side = 0; side < SIDES; ++side)
            sum[r][side] = load_vector(to + own * step + side * TILE_LANES, columns - side * TILE_LANES);
    }
    for (int i = 0; i < depth; ++i) {
        vector factor[SIDES];
        UNROLL for (int side = 0; side < SIDES; ++side) factor[side] = right[i * right_step + side];
        UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows) {
            const float value = a[row[r] + i];
            UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] += value * factor[side];
        }
    }
    UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows && r < valid)
        UNROLL for (int side = 0; side < SIDES; ++side)
            store_vector(sum[r][side], to + r * step + side * TILE_LANES, columns - side * TILE_LANES);
}

/* to[key][column] += sum over the queries of weights[key][query] right[query][column] */
INLINE void add_rows(
    const vector *weights, const vector *right, __global float *to, int step, const int columns, int keys, int count)
{
    const float *a = (const float *)weights;
    for (int i = 0; i < PADDED(columns); i += SIDES) { /* not unrolled, as it takes long to build */
        int key = 0;
        for (const int end = high_end(keys); key + HIGH <= end; key += HIGH)
            row_tile(
                a + key * QUERIES, right + i, PADDED(columns), to + key * step + i * TILE_LANES, step,
                columns - i * TILE_LANES, count, HIGH, HIGH);
        for (; key < keys; key += LOW)
            row_tile(
                a + key * QUERIES, right + i, PADDED(columns), to + key * step + i * TILE_LANES, step,
                columns - i * TILE_LANES, count, smaller(LOW, keys - key), LOW);
    }
}

/* The weights again, and the gradients of the scores in place of those of the weights. */
INLINE void weigh_again(
    vector *scores, vector *grads, const vector *mask, int has_mask, const vector *logs, const vector *products,
    int keys, int ahead, int causal)
{
    const int crosses = causal && ahead + keys > 1;
    UNROLL for (int side = 0; side < SIDES; ++side) {
        const vector_mask query = LANE_NUMBERS + side * TILE_LANES;
        for (int key = 0; key < keys; ++key) {
            const int at = key * PITCH + side;
            const vector score = seen(scores[at], mask[at], has_mask, crosses, ahead + key, query);
            const vector weight = power_of_2(score - logs[side]);
            scores[at] = weight;
            grads[at] = weight * (grads[at] - products[side]);
        }
    }
}

INLINE void clear_rows(__global float *to, int step, int rows, int columns)
{
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < columns; ++i) to[row * step + i] = 0.0f;
}

/* All gradients of a head, in a work-item for some of all heads: blocks of queries one after the other add to those of
   the keys and values. */
__kernel void attend_grad(
    __global float *restrict dq, __global float *restrict dk, __global float *restrict dv,
    __global const float *restrict grad, __global const float *restrict out, __global const float *restrict logs,
    __global const float *restrict q, __global const float *restrict k, __global const float *restrict v,
    __global const float *restrict mask, __global const int *places, float scale, int groups, int heads, int queries,
    int keys, int causal, int has_mask, int mask_batch, int mask_head, int mask_row)
{
    vector query[HEAD * PITCH], up[VALUE * PITCH], query_rows[QUERIES * PADDED(HEAD)], up_rows[QUERIES * PADDED(VALUE)];
    vector scores[(KEYS + HIGH) * PITCH], grads[(KEYS + HIGH) * PITCH], added[KEYS * PITCH];
    vector sums[(HEAD + HIGH) * PITCH], log_sums[PITCH], products[PITCH], factors[PITCH];
    const int q_row = row_step(places, Q), k_row = row_step(places, K), v_row = row_step(places, V);
    const int out_row = row_step(places, OUT);
    FOR_EACH(group, groups) {
        const int batch = group / heads, head = group % heads;
        const int q_place = place_of(places, Q, batch, head), k_place = place_of(places, K, batch, head);
        const int v_place = place_of(places, V, batch, head), out_place = place_of(places, OUT, batch, head);
        __global const float *own_mask = mask + batch * mask_batch + head * mask_head;
        clear_rows(dk + k_place, k_row, keys, HEAD);
        clear_rows(dv + v_place, v_row, keys, VALUE);
        for (int first = 0; first < queries; first += QUERIES) {
            const int count = smaller(QUERIES, queries - first);
            __global const float *own_q = q + q_place + first * q_row, *own_up = grad + out_place + first * out_row;
            /* The sum over a query's weights of their gradients is that of its result with the result's. */
            turn(up, own_up, out_row, VALUE, count, 1.0f);
            fill(products, PITCH, 0.0f);
            for (int query_ = 0; query_ < count; ++query_) {
                __global const float *a = own_up + query_ * out_row, *b = out + out_place + (first + query_) * out_row;
                lanes sum = 0.0f;
                FOR_COLUMN_LANES(i, VALUE)
                    sum += load_lanes(a + i, VALUE - i, 0.0f) * load_lanes(b + i, VALUE - i, 0.0f);
                ((float *)products)[query_] = lanes_sum(sum);
            }
            fill(log_sums, PITCH, INFINITY);
            for (int i = 0; i < count; ++i) ((float *)log_sums)[i] = logs[group * queries + first + i];
            turn(query, own_q, q_row, HEAD, count, scale * LOG2E);
            copy_rows(query_rows, own_q, q_row, HEAD, count, scale);
            copy_rows(up_rows, own_up, out_row, VALUE, count, 1.0f);
            fill(sums, (HEAD + HIGH) * PITCH, 0.0f);
            const int end = causal ? smaller(keys, first + count) : keys;
            for (int key = 0; key < end; key += KEYS) {
                const int block = smaller(KEYS, end - key);
                __global const float *own_k = k + k_place + key * k_row, *own_v = v + v_place + key * v_row;
                if (has_mask) turn(added, own_mask + first * mask_row + key, mask_row, block, count, LOG2E);
                for (int strip = 0; strip < PITCH && strip * TILE_LANES < count; strip += SIDES) {
                    const int ahead = key - first - strip * TILE_LANES;
                    const int here = larger(0, causal ? smaller(block, WIDTH - ahead) : block);
                    if (here > 0) {
                        multiply(own_k, k_row, 1, query + strip, scores + strip, HEAD, here, 0);
                        multiply(own_v, v_row, 1, up + strip, grads + strip, VALUE, here, 0);
                        weigh_again(
                            scores + strip, grads + strip, added + strip, has_mask, log_sums + strip, products + strip,
                            here, ahead, causal);
                        multiply(own_k, 1, k_row, grads + strip, sums + strip, here, HEAD, 1);
                    }
                    for (int i = here; i < block; ++i)
                        UNROLL for (int side = 0; side < SIDES; ++side)
                            scores[i * PITCH + strip + side] = grads[i * PITCH + strip + side] = 0.0f;
                }
                add_rows(scores, up_rows, dv + v_place + key * v_row, v_row, VALUE, block, count);
                add_rows(grads, query_rows, dk + k_place + key * k_row, k_row, HEAD, block, count);
            }
            fill(factors, PITCH, scale);
            turn_back(dq + q_place + first * q_row, q_row, sums, factors, HEAD, count);
        }
    }
}
