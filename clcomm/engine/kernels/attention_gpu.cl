/* Scaled dot-product attention and its gradients for GPUs; the method, HEAD, VALUE, `places`, masks and causal are those
   of attention_tiles.cl.

   An item takes a query, or a key for its gradients; a group reads TAKEN rows of the others at a time. */

/* As in attention_tiles.cl. */
enum { Q, K, V, OUT };

INLINE int place_of(__global const int *places, int tensor, int batch, int head)
{
    return places[4 * tensor] + batch * places[4 * tensor + 1] + head * places[4 * tensor + 2];
}

INLINE int row_step(__global const int *places, int tensor) { return places[4 * tensor + 3]; }

#define TAKEN 8

DEFINE_POWER_OF_2(power_of_2, float, int, as_int, as_float)

INLINE void take_rows(__local float *to, __global const float *from, int step, int columns, int rows)
{
    for (int i = get_local_id(0); i < rows * columns; i += ROW_GROUP) to[i] = from[i / columns * step + i % columns];
}

INLINE float dot_of(const float *a, __local const float *b, const int columns)
{
    float sum = 0.0f;
    for (int i = 0; i < columns; ++i) sum = MULTIPLY_ADD(a[i], b[i], sum);
    return sum;
}

__kernel void attend(
    __global float *restrict out, __global float *restrict logs, __global const float *restrict q,
    __global const float *restrict k, __global const float *restrict v, __global const float *restrict mask,
    __global const int *places, float scale, int groups, int heads, int queries, int keys, int causal, int has_mask,
    int mask_batch, int mask_head, int mask_row)
{
    __local float some_k[TAKEN * HEAD], some_v[TAKEN * VALUE];
    float query[HEAD], sums[VALUE], scores[TAKEN];
    const int blocks = (queries + ROW_GROUP - 1) / ROW_GROUP, unit = get_group_id(0);
    const int group = unit / blocks, batch = group / heads, head = group % heads, first = unit % blocks * ROW_GROUP;
    const int row = first + (int)get_local_id(0), own = smaller(row, queries - 1); /* surplus items repeat the last */
    const int k_row = row_step(places, K), v_row = row_step(places, V);
    const int end = causal ? smaller(keys, first + ROW_GROUP) : keys;
    __global const float *from = q + place_of(places, Q, batch, head) + own * row_step(places, Q);
    __global const float *own_mask = mask + batch * mask_batch + head * mask_head + own * mask_row;
    for (int i = 0; i < HEAD; ++i) query[i] = from[i] * scale * LOG2E;
    for (int i = 0; i < VALUE; ++i) sums[i] = 0.0f;
    float top = -INFINITY, total = 0.0f;
    for (int key = 0; key < end; key += TAKEN) {
        const int taken = smaller(TAKEN, end - key);
        barrier(CLK_LOCAL_MEM_FENCE);
        take_rows(some_k, k + place_of(places, K, batch, head) + key * k_row, k_row, HEAD, taken);
        take_rows(some_v, v + place_of(places, V, batch, head) + key * v_row, v_row, VALUE, taken);
        barrier(CLK_LOCAL_MEM_FENCE);
        float high = top;
        for (int i = 0; i < taken; ++i) {
            float score = dot_of(query, some_k + i * HEAD, HEAD);
            if (has_mask) score += own_mask[key + i] * LOG2E;
            scores[i] = causal && key + i > own ? -INFINITY : score;
            high = LARGER(high, scores[i]);
        }
        const float base = high == -INFINITY ? 0.0f : high, factor = power_of_2(top - base);
        top = high;
        total *= factor;
        for (int i = 0; i < VALUE; ++i) sums[i] *= factor;
        for (int i = 0; i < taken; ++i) {
            const float weight = power_of_2(scores[i] - base);
            total += weight;
            for (int j = 0; j < VALUE; ++j) sums[j] = MULTIPLY_ADD(weight, some_v[i * VALUE + j], sums[j]);
        }
    }
    if (row >= queries) return;
    __global float *to = out + place_of(places, OUT, batch, head) + row * row_step(places, OUT);
    for (int i = 0; i < VALUE; ++i) to[i] = total == 0.0f ? 0.0f : sums[i] / total;
    logs[group * queries + row] = total == 0.0f ? INFINITY : top + log(total) * LOG2E;
}

/* dq, and in `products` the sum over each query's weights of their gradients: that of its result with the result's. */
__kernel void attend_grad_queries(
    __global float *restrict dq, __global float *restrict products, __global const float *restrict grad,
    __global const float *restrict out, __global const float *restrict logs, __global const float *restrict q,
    __global const float *restrict k, __global const float *restrict v, __global const float *restrict mask,
    __global const int *places, float scale, int groups, int heads, int queries, int keys, int causal, int has_mask,
    int mask_batch, int mask_head, int mask_row)
{
    __local float some_k[TAKEN * HEAD], some_v[TAKEN * VALUE];
    float query[HEAD], up[VALUE], sums[HEAD];
    const int blocks = (queries + ROW_GROUP - 1) / ROW_GROUP, unit = get_group_id(0);
    const int group = unit / blocks, batch = group / heads, head = group % heads, first = unit % blocks * ROW_GROUP;
    const int row = first + (int)get_local_id(0), own = smaller(row, queries - 1);
    const int k_row = row_step(places, K), v_row = row_step(places, V);
    const int end = causal ? smaller(keys, first + ROW_GROUP) : keys;
    const int q_place = place_of(places, Q, batch, head), out_place = place_of(places, OUT, batch, head);
    __global const float *from = q + q_place + own * row_step(places, Q);
    __global const float *own_mask = mask + batch * mask_batch + head * mask_head + own * mask_row;
    float product = 0.0f;
    for (int i = 0; i < HEAD; ++i) {
        query[i] = from[i] * scale * LOG2E;
        sums[i] = 0.0f;
    }
    for (int i = 0; i < VALUE; ++i) {
        const int at = out_place + own * row_step(places, OUT) + i;
        up[i] = grad[at];
        product = MULTIPLY_ADD(up[i], out[at], product);
    }
    const float log_sum = logs[group * queries + own];
    for (int key = 0; key < end; key += TAKEN) {
        const int taken = smaller(TAKEN, end - key);
        barrier(CLK_LOCAL_MEM_FENCE);
        take_rows(some_k, k + place_of(places, K, batch, head) + key * k_row, k_row, HEAD, taken);
        take_rows(some_v, v + place_of(places, V, batch, head) + key * v_row, v_row, VALUE, taken);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = 0; i < taken; ++i) {
            float score = dot_of(query, some_k + i * HEAD, HEAD);
            if (has_mask) score += own_mask[key + i] * LOG2E;
            const float weight = causal && key + i > own ? 0.0f : power_of_2(score - log_sum);
            const float slope = weight * (dot_of(up, some_v + i * VALUE, VALUE) - product);
            for (int j = 0; j < HEAD; ++j) sums[j] = MULTIPLY_ADD(slope, some_k[i * HEAD + j], sums[j]);
        }
    }
    if (row >= queries) return;
    products[group * queries + row] = product;
    for (int i = 0; i < HEAD; ++i) dq[q_place + row * row_step(places, Q) + i] = sums[i] * scale;
}

/* dk and dv */
__kernel void attend_grad_keys(
    __global float *restrict dk, __global float *restrict dv, __global const float *restrict products,
    __global const float *restrict grad, __global const float *restrict logs, __global const float *restrict q,
    __global const float *restrict k, __global const float *restrict v, __global const float *restrict mask,
    __global const int *places, float scale, int groups, int heads, int queries, int keys, int causal, int has_mask,
    int mask_batch, int mask_head, int mask_row)
{
    __local float some_q[TAKEN * HEAD], some_up[TAKEN * VALUE];
    float own_k[HEAD], own_v[VALUE], k_sums[HEAD], v_sums[VALUE];
    const int blocks = (keys + ROW_GROUP - 1) / ROW_GROUP, unit = get_group_id(0);
    const int group = unit / blocks, batch = group / heads, head = group % heads, first = unit % blocks * ROW_GROUP;
    const int key = first + (int)get_local_id(0), own = smaller(key, keys - 1);
    const int q_row = row_step(places, Q), out_row = row_step(places, OUT);
    const int k_place = place_of(places, K, batch, head) + own * row_step(places, K);
    const int v_place = place_of(places, V, batch, head) + own * row_step(places, V);
    __global const float *own_mask = mask + batch * mask_batch + head * mask_head + own;
    for (int i = 0; i < HEAD; ++i) {
        own_k[i] = k[k_place + i];
        k_sums[i] = 0.0f;
    }
    for (int i = 0; i < VALUE; ++i) {
        own_v[i] = v[v_place + i];
        v_sums[i] = 0.0f;
    }
    for (int row = causal ? first / TAKEN * TAKEN : 0; row < queries; row += TAKEN) {
        const int taken = smaller(TAKEN, queries - row);
        barrier(CLK_LOCAL_MEM_FENCE);
        take_rows(some_q, q + place_of(places, Q, batch, head) + row * q_row, q_row, HEAD, taken);
        take_rows(some_up, grad + place_of(places, OUT, batch, head) + row * out_row, out_row, VALUE, taken);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = 0; i < taken; ++i) {
            float score = dot_of(own_k, some_q + i * HEAD, HEAD) * scale * LOG2E;
            if (has_mask) score += own_mask[(row + i) * mask_row] * LOG2E;
            const int at = group * queries + row + i;
            const float weight = causal && own > row + i ? 0.0f : power_of_2(score - logs[at]);
            const float slope = scale * weight * (dot_of(own_v, some_up + i * VALUE, VALUE) - products[at]);
            for (int j = 0; j < HEAD; ++j) k_sums[j] = MULTIPLY_ADD(slope, some_q[i * HEAD + j], k_sums[j]);
            for (int j = 0; j < VALUE; ++j) v_sums[j] = MULTIPLY_ADD(weight, some_up[i * VALUE + j], v_sums[j]);
        }
    }
    if (key >= keys) return;
    for (int i = 0; i < HEAD; ++i) dk[k_place + i] = k_sums[i];
    for (int i = 0; i < VALUE; ++i) dv[v_place + i] = v_sums[i];
}
