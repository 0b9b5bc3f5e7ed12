/* Scaled dot-product attention, out = softmax(scale q k^T + mask) v, without the matrix of scores in memory: keys are
   taken in blocks, and a query keeps the maximum of its scores so far, the sum of their exponentials and the weighted sum
   of the values, both relative to that maximum. Scores are in units of log(2), as 2^x is the cheaper exponential.
   Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
   2022, and for the order of the loops Dao, "FlashAttention-2", 2023.

   A query that sees no key gets zeros, and so do its gradients. */

#include "attention_tiles.cl"

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
