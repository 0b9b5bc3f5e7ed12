/* Scaled dot-product attention, out = softmax(scale q k^T + mask) v, and its gradients, without the matrix of scores in
   memory: keys are taken in blocks, and a query keeps the maximum of its scores so far, the sum of their exponentials
   and the weighted sum of the values, both relative to that maximum. Backward computes the weights again, from the
   logarithm of that sum. Scores are in units of log(2), as 2^x is the cheaper exponential.
   Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
   2022, and for the order of the loops Dao, "FlashAttention-2", 2023.

   HEAD is the length of a query and of a key, VALUE that of a value. `places` says where a tensor's rows lie: for each
   of q, k, v and out the first element, and the distances of batches, heads and rows. Gradients lie as their tensors do.
   A mask is added to the scores; its rows lie at mask + batch * mask_batch + head * mask_head + query * mask_row.
   Causal: query i sees the keys up to i. A query that sees no key gets zeros, and so do its gradients. */

enum { Q, K, V, OUT };

INLINE int place_of(__global const int *places, int tensor, int batch, int head)
{
    return places[4 * tensor] + batch * places[4 * tensor + 1] + head * places[4 * tensor + 2];
}

INLINE int row_step(__global const int *places, int tensor) { return places[4 * tensor + 3]; }

/* Lanes run along the queries, so that no sum crosses them, and no number of lanes changes a bit. A block of QUERIES
   rows is turned once; keys and values are read where they lie, number by number. Sums of a product are in registers,
   in tiles of rows by SIDES vectors, as in gemm.cl. For the gradients of keys and values lanes run along their rows. */

#define QUERIES 32
#define KEYS 48
#define SIDES 2
#define WIDTH (SIDES * TILE_LANES)
#define PITCH (QUERIES / TILE_LANES) /* vectors of a row of QUERIES */
#define HIGH (TILE_LANES == 16 ? 12 : 6)
#define LOW 4
#define PADDED(count) (((count) + WIDTH - 1) / WIDTH * SIDES) /* vectors of a row of HEAD or VALUE */

#if TILE_LANES == 16
DEFINE_POWER_OF_2(power_of_2, float16, int16, as_int16, as_float16)
#define LANE_NUMBERS (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#else
DEFINE_POWER_OF_2(power_of_2, float8, int8, as_int8, as_float8)
#define LANE_NUMBERS (int8)(0, 1, 2, 3, 4, 5, 6, 7)
#endif

/* to[column][query] = factor * from[query][column]; queries after the last one repeat it. */
INLINE void turn(vector *to, __global const float *from, int step, int columns, int count, float factor)
{
    float *flat = (float *)to;
    int column = 0;
    for (; column + 8 <= columns; column += 8)
        for (int query = 0; query < QUERIES; query += 8) {
            float8 part[8];
            UNROLL for (int i = 0; i < 8; ++i) part[i] = load8(from + smaller(query + i, count - 1) * step + column);
            transpose8(part);
            UNROLL for (int i = 0; i < 8; ++i) *(float8 *)(flat + (column + i) * QUERIES + query) = part[i] * factor;
        }
    for (; column < columns; ++column)
        for (int query = 0; query < QUERIES; ++query)
            flat[column * QUERIES + query] = factor * from[smaller(query, count - 1) * step + column];
}

/* to[query][column] = factors[query] * from[column][query], for `count` queries. */
INLINE void turn_back(
    __global float *to, int step, const vector *from, const vector *factors, int columns, int count)
{
    const float *flat = (const float *)from, *factor = (const float *)factors;
    int column = 0;
    for (; column + 8 <= columns; column += 8)
        for (int query = 0; query < count; query += 8) {
            float8 part[8];
            UNROLL for (int i = 0; i < 8; ++i)
                part[i] = *(const float8 *)(flat + (column + i) * QUERIES + query) * *(const float8 *)(factor + query);
            transpose8(part);
            UNROLL for (int i = 0; i < 8; ++i) if (query + i < count) store8(part[i], to + (query + i) * step + column);
        }
    for (; column < columns; ++column)
        for (int query = 0; query < count; ++query)
            to[query * step + column] = flat[column * QUERIES + query] * factor[query];
}

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

INLINE void fill(vector *to, int count, float value)
{
    for (int i = 0; i < count; ++i) to[i] = value;
}

/* to[row][query] = sum over i of a[row, i] right[i][query], added to what is there with `adds`. Rows after `valid` read
   the last one. */
INLINE void tile(
    __global const float *a, int a_row, int a_column, const vector *right, vector *to, int depth, int valid,
    const int adds, const int rows)
{
    vector sum[HIGH][SIDES];
    int row[HIGH];
    UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows) {
        row[r] = smaller(r, valid - 1) * a_row;
        UNROLL for (int side = 0; side < SIDES; ++side) {
            const vector zero = 0.0f;
            sum[r][side] = adds ? to[r * PITCH + side] : zero;
        }
    }
    for (int i = 0; i < depth; ++i) {
        vector factor[SIDES];
        UNROLL for (int side = 0; side < SIDES; ++side) factor[side] = right[i * PITCH + side];
        UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows) {
            const float value = a[row[r]];
            UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] += value * factor[side];
        }
        a += a_column;
    }
    UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows)
        UNROLL for (int side = 0; side < SIDES; ++side) to[r * PITCH + side] = sum[r][side];
}

/* The end of the high tiles: two low ones take less than a high one and a part. */
INLINE int high_end(int rows) { return rows - 2 * LOW * (rows % HIGH == 2 * LOW % HIGH); }

INLINE void multiply(
    __global const float *a, int a_row, int a_column, const vector *right, vector *to, int depth, int rows,
    const int adds)
{
    int r = 0;
    for (const int end = high_end(rows); r + HIGH <= end; r += HIGH)
        tile(a + r * a_row, a_row, a_column, right, to + r * PITCH, depth, HIGH, adds, HIGH);
    for (; r < rows; r += LOW)
        tile(a + r * a_row, a_row, a_column, right, to + r * PITCH, depth, smaller(LOW, rows - r), adds, LOW);
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

/* Adds the mask to a vector of scores, and hides the keys after a causal query: -INFINITY. */
INLINE vector seen(vector score, vector added, int has_mask, int crosses, int key, vector_mask query)
{
    const vector hidden = -INFINITY;
    if (has_mask) score += added;
    return crosses && key > 0 ? (key > query ? hidden : score) : score;
}

/* Softmax goes on with `keys` scores of each query: they become weights relative to the new maximum, and what was
   summed relative to the old one is scaled. `ahead` is the first key's number less the first query's. */
INLINE void weigh(
    vector *scores, const vector *mask, int has_mask, vector *top, vector *total, vector *sums, int keys, int ahead,
    int causal)
{
    const int crosses = causal && ahead + keys > 1;
    UNROLL for (int side = 0; side < SIDES; ++side) {
        const vector_mask query = LANE_NUMBERS + side * TILE_LANES;
        const vector lowest = -INFINITY, zero = 0.0f;
        vector high = top[side];
        for (int key = 0; key < keys; ++key) {
            const int at = key * PITCH + side;
            if (has_mask || crosses) scores[at] = seen(scores[at], mask[at], has_mask, crosses, ahead + key, query);
            high = LARGER(high, scores[at]);
        }
        const vector base = high == lowest ? zero : high, factor = power_of_2(top[side] - base);
        vector sum = total[side] * factor;
        for (int key = 0; key < keys; ++key) {
            const vector weight = power_of_2(scores[key * PITCH + side] - base);
            scores[key * PITCH + side] = weight;
            sum += weight;
        }
        top[side] = high;
        total[side] = sum;
        for (int i = 0; i < VALUE; ++i) sums[i * PITCH + side] *= factor;
    }
}

/* Attention of a head's queries from `first` on, in a work-item for some of all blocks. `logs` gets the logarithm of
   each query's sum, INFINITY where it is zero. */
__kernel void attend(
    __global float *restrict out, __global float *restrict logs, __global const float *restrict q,
    __global const float *restrict k, __global const float *restrict v, __global const float *restrict mask,
    __global const int *places, float scale, int groups, int heads, int queries, int keys, int causal, int has_mask,
    int mask_batch, int mask_head, int mask_row)
{
    vector query[HEAD * PITCH], scores[(KEYS + HIGH) * PITCH], sums[(VALUE + HIGH) * PITCH], added[KEYS * PITCH];
    vector top[PITCH], total[PITCH];
    const int blocks = (queries + QUERIES - 1) / QUERIES;
    const int k_row = row_step(places, K), v_row = row_step(places, V);
    FOR_EACH(unit, groups * blocks) {
        const int group = unit / blocks, batch = group / heads, head = group % heads;
        const int first = unit % blocks * QUERIES, count = smaller(QUERIES, queries - first);
        __global const float *own_k = k + place_of(places, K, batch, head);
        __global const float *own_v = v + place_of(places, V, batch, head);
        __global const float *own_mask = mask + batch * mask_batch + head * mask_head + first * mask_row;
        turn(
            query, q + place_of(places, Q, batch, head) + first * row_step(places, Q), row_step(places, Q), HEAD, count,
            scale * LOG2E);
        fill(sums, (VALUE + HIGH) * PITCH, 0.0f);
        fill(top, PITCH, -INFINITY);
        fill(total, PITCH, 0.0f);
        const int end = causal ? smaller(keys, first + count) : keys;
        for (int key = 0; key < end; key += KEYS) {
            const int block = smaller(KEYS, end - key);
            if (has_mask) turn(added, own_mask + key, mask_row, block, count, LOG2E);
            for (int strip = 0; strip < PITCH && strip * TILE_LANES < count; strip += SIDES) {
                const int ahead = key - first - strip * TILE_LANES;
                const int here = causal ? smaller(block, WIDTH - ahead) : block;
                if (here <= 0) continue;
                multiply(own_k + key * k_row, k_row, 1, query + strip, scores + strip, HEAD, here, 0);
                weigh(
                    scores + strip, added + strip, has_mask, top + strip, total + strip, sums + strip, here, ahead,
                    causal);
                multiply(own_v + key * v_row, 1, v_row, scores + strip, sums + strip, here, VALUE, 1);
            }
        }
        const vector zero = 0.0f;
        for (int i = 0; i < count; ++i) {
            const float sum = ((float *)total)[i];
            logs[group * queries + first + i] = sum == 0.0f ? INFINITY : ((float *)top)[i] + log(sum) * LOG2E;
        }
        for (int i = 0; i < PITCH; ++i) total[i] = total[i] == zero ? zero : 1.0f / total[i];
        turn_back(
            out + place_of(places, OUT, batch, head) + first * row_step(places, OUT), row_step(places, OUT), sums,
            total, VALUE, count);
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
