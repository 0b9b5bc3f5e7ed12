/* Packing for conv2d.cl: eight images share a vector, one in each lane, so that x[N][C][H][W] becomes [N/8][C][H][W] of
   float8. Lanes past the last image hold zeros. */

#define MASKED 4 /* as in conv2d.cl */

/* Returns the pixel at x of 8 images, `stride` apart; lanes from `valid` on are zero. */
INLINE float8 gather_lanes(__global const float *x, long stride, int valid)
{
    float8 value = 0.0f;
    for (int i = 0; i < valid; ++i) ((float *)&value)[i] = x[i * stride];
    return value;
}

/* Loads into `rows` the lanes of the 8 pixels from x on. */
INLINE void gather_block(float8 rows[8], __global const float *x, long stride, int valid)
{
    UNROLL for (int i = 0; i < 8; ++i) rows[i] = i < valid ? load8(x + i * stride) : (float8)0.0f;
    transpose8(rows);
}

__kernel void pack_lanes(__global const float *x, __global float8 *packed, int images, int features, int run)
{
    const int block = get_global_id(1), first = get_global_id(0) * run, last = smaller(first + run, features);
    const int valid = smaller(8, images - block * 8);
    x += (long)block * 8 * features;
    packed += (long)block * features;
    int f = first;
    for (; f + 8 <= last; f += 8) {
        float8 rows[8];
        gather_block(rows, x + f, features, valid);
        UNROLL for (int i = 0; i < 8; ++i) packed[f + i] = rows[i];
    }
    for (; f < last; ++f) packed[f] = gather_lanes(x + f, features, valid);
}

INLINE float8 unmasked(float8 value, uchar8 place)
{
    return convert_int8(place) == MASKED ? (float8)0.0f : value;
}

/* Packs a channel of a gradient and returns the sums of its pixels; elements that `places` masks become zero. */
INLINE float8 pack_channel(
    __global const float *grad, __global const uchar8 *places, __global float8 *packed, int has_places, long stride,
    int valid, int plane)
{
    float8 sum[2] = {0.0f, 0.0f};
    int p = 0;
    for (; p + 8 <= plane; p += 8) {
        float8 rows[8];
        gather_block(rows, grad + p, stride, valid);
        UNROLL for (int i = 0; i < 8; ++i) {
            const float8 row = has_places ? unmasked(rows[i], places[p + i]) : rows[i];
            packed[p + i] = row;
            sum[i & 1] += row;
        }
    }
    for (; p < plane; ++p) {
        const float8 row = gather_lanes(grad + p, stride, valid);
        packed[p] = has_places ? unmasked(row, places[p]) : row;
        sum[0] += packed[p];
    }
    return sum[0] + sum[1];
}

/* Packs a gradient and sums each channel's pixels: bias_partial[N/8][outputs], lanes not yet added. */
__kernel void pack_gradient(
    __global const float *grad, __global float8 *packed, __global float8 *bias_partial, int images, int outputs,
    int plane)
{
    const int o = get_global_id(0), block = get_global_id(1), valid = smaller(8, images - block * 8);
    const long stride = (long)outputs * plane, at = ((long)block * outputs + o) * plane;
    grad += block * 8 * stride + (long)o * plane;
    bias_partial[block * outputs + o] = pack_channel(grad, 0, packed + at, 0, stride, valid, plane);
}

/* As `pack_gradient` for dy of `convolve_relu_pool`; elements that ReLU masked become zero. */
__kernel void pack_pooled_gradient(
    __global const float *grad, __global const uchar8 *places, __global float8 *packed, __global float8 *bias_partial,
    int images, int outputs, int plane)
{
    const int o = get_global_id(0), block = get_global_id(1), valid = smaller(8, images - block * 8);
    const long stride = (long)outputs * plane, at = ((long)block * outputs + o) * plane;
    grad += block * 8 * stride + (long)o * plane;
    bias_partial[block * outputs + o] = pack_channel(grad, places + at, packed + at, 1, stride, valid, plane);
}

/* Computes the packed gradient of the convolution's result from that of `convolve_relu_pool`'s result, and sums each
   channel: bias_partial[N/8][outputs], lanes not yet added. */
__kernel void unpool_lanes(
    __global const float *grad, __global const uchar8 *places, __global float8 *packed, __global float8 *bias_partial,
    int images, int outputs, int out_height, int out_width)
{
    const int o = get_global_id(0), block = get_global_id(1), valid = smaller(8, images - block * 8);
    const int pooled_width = out_width / 2, pooled_plane = out_height / 2 * pooled_width;
    const long stride = (long)outputs * pooled_plane;
    grad += block * 8 * stride + (long)o * pooled_plane;
    places += ((long)block * outputs + o) * pooled_plane;
    packed += ((long)block * outputs + o) * out_height * out_width;
    const float8 zero = 0.0f;
    float8 sum = zero;
    for (int first = 0; first < pooled_plane; first += 8) {
        float8 values[8];
        const int count = smaller(8, pooled_plane - first);
        if (count == 8) gather_block(values, grad + first, stride, valid);
        else for (int p = 0; p < count; ++p) values[p] = gather_lanes(grad + first + p, stride, valid);
        for (int p = 0; p < count; ++p) {
            const int8 place = convert_int8(places[first + p]);
            __global float8 *to = packed + (first + p) / pooled_width * 2 * out_width + (first + p) % pooled_width * 2;
            to[0] = place == 0 ? values[p] : zero;
            to[1] = place == 1 ? values[p] : zero;
            to[out_width] = place == 2 ? values[p] : zero;
            to[out_width + 1] = place == 3 ? values[p] : zero;
            sum += place == MASKED ? zero : values[p];
        }
    }
    /* The last row and column of odd sizes took no part in the pooling. */
    if (out_width % 2) for (int row = 0; row < out_height; ++row) packed[(row + 1) * out_width - 1] = zero;
    if (out_height % 2) for (int p = 0; p < out_width; ++p) packed[(out_height - 1) * out_width + p] = zero;
    bias_partial[block * outputs + o] = sum;
}

/* sums[i] = the sum of partial[chunk][i] over chunks, then lanes. */
__kernel void add_partials(__global const float8 *partial, __global float *sums, int count, int chunks)
{
    FOR_EACH(i, count) {
        float8 sum = partial[i];
        for (int chunk = 1; chunk < chunks; ++chunk) sum += partial[(long)chunk * count + i];
        sums[i] = lanes_sum(sum);
    }
}
