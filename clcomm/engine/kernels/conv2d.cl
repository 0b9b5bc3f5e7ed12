/* Convolution of x[N,C,H,W] with weight[O,C,kernel_h,kernel_w] to y[N,O,out_h,out_w], and its gradients.

   `convolve` serves the result and the data gradient, which is the convolution of dy with the kernel turned round:
       y[n,o,oy,ox] = bias[o] + sum over c,i,j of x[n,c,iy,ix] * weight[first + o*w_o + c*w_c + i*w_i + j*w_j]
   where iy = (oy*stride + i - pad_h) / dilation, and terms outside x, or between its rows and columns when dilation
   is the forward pass's stride, are left out rather than multiplied by zero. */

#ifdef ON_CPU

/* Eight images share a vector, one in each lane: x is first packed to [N/8][C][H][W] of float8. Borders, strides
   and kernel sizes then concern whole vectors, every load is aligned, and no width leaves lanes idle. Lanes past the
   last image hold zeros. */

#define TILE_OUTPUTS 4
#define TILE_PIXELS 3
#define WAITING 64

__kernel void pack_lanes(__global const float *x, __global float8 *packed, int images, int features, int run)
{
    const int block = get_global_id(1), first = get_global_id(0) * run, last = min(first + run, features);
    const int valid = min(8, images - block * 8);
    x += (long)block * 8 * features;
    packed += (long)block * features;
    int f = first;
    for (; valid == 8 && f + 8 <= last; f += 8) {
        float8 rows[8];
        UNROLL for (int i = 0; i < 8; ++i) rows[i] = vload8(0, x + (long)i * features + f);
        transpose8(rows);
        UNROLL for (int i = 0; i < 8; ++i) packed[f + i] = rows[i];
    }
    for (; f < last; ++f) {
        float values[8] = {0};
        for (int i = 0; i < valid; ++i) values[i] = x[(long)i * features + f];
        packed[f] = vload8(0, values);
    }
}

/* Stores `count` pixels of 8 images from lanes to rows `stride` apart. */
INLINE void unpack_lanes(__local const float8 *packed, __global float *to, long stride, int count, int valid)
{
    int p = 0;
    for (; p + 8 <= count; p += 8) {
        float8 rows[8];
        UNROLL for (int i = 0; i < 8; ++i) rows[i] = packed[p + i];
        transpose8(rows);
        UNROLL for (int i = 0; i < 8; ++i) if (i < valid) vstore8(rows[i], 0, to + i * stride + p);
    }
    for (; p < count; ++p)
        for (int i = 0; i < valid; ++i) to[i * stride + p] = ((__local const float *)(packed + p))[i];
}

/* The index whose `dilation`-fold is `scaled`, or -1 where there is none. */
INLINE int undilated(int scaled, int dilation)
{
#ifdef DILATED
    return scaled >= 0 && scaled % dilation == 0 ? scaled / dilation : -1;
#else
    return scaled;
#endif
}

/* Adds one tap of the kernel, over all channels, to the pixels in `mask` of a tile. The sums stay in registers. */
INLINE void add_tap(
    float8 sum[TILE_OUTPUTS][TILE_PIXELS], __global const float8 *x, const int offset[TILE_PIXELS], int plane,
    __global const float *weight, const int w_output[TILE_OUTPUTS], int w_channel, int channels, const int mask)
{
    for (int c = 0; c < channels; ++c) {
        float8 value[TILE_PIXELS];
        UNROLL for (int p = 0; p < TILE_PIXELS; ++p) if (mask >> p & 1) value[p] = x[offset[p]];
        UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o) {
            const float factor = weight[w_output[o]];
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) if (mask >> p & 1) sum[o][p] += factor * value[p];
        }
        x += plane;
        weight += w_channel;
    }
}

__kernel void convolve(
    __global const float8 *packed, __global const float *weight, __global const float *bias, __global float *y,
    int images, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int dilation, int pad_h, int pad_w,
    int w_first, int w_o, int w_c, int w_i, int w_j, int has_bias)
{
    /* Results wait here until there are vectors of 8 pixels to store for each image. */
    __local float8 waiting[TILE_OUTPUTS][WAITING];
    const int o = get_global_id(0) * TILE_OUTPUTS, block = get_global_id(1);
    const int outputs_valid = min(TILE_OUTPUTS, outputs - o), images_valid = min(8, images - block * 8);
    const int plane = height * width, out_plane = out_height * out_width;
    const long image_stride = (long)outputs * out_plane;
    int w_output[TILE_OUTPUTS];
    float8 start[TILE_OUTPUTS];
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i) {
        const int output = o + min(i, outputs_valid - 1);
        w_output[i] = w_first + output * w_o;
        start[i] = has_bias ? bias[output] : 0.0f;
    }
    packed += (long)block * channels * plane;
    y += block * 8 * image_stride + (long)o * out_plane;
    int filled = 0, stored = 0;
    for (int oy = 0; oy < out_height; ++oy)
        for (int ox = 0; ox < out_width; ox += TILE_PIXELS) {
            float8 sum[TILE_OUTPUTS][TILE_PIXELS];
            UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i)
                UNROLL for (int p = 0; p < TILE_PIXELS; ++p) sum[i][p] = start[i];
            for (int i = 0; i < kernel_h; ++i) {
                const int iy = undilated(oy * stride + i - pad_h, dilation);
                if (iy < 0 || iy >= height) continue;
                for (int j = 0; j < kernel_w; ++j) {
                    int offset[TILE_PIXELS], mask = 0;
                    UNROLL for (int p = 0; p < TILE_PIXELS; ++p) {
                        offset[p] = undilated((ox + p) * stride + j - pad_w, dilation);
                        mask |= (ox + p < out_width && offset[p] >= 0 && offset[p] < width) << p;
                    }
                    __global const float8 *from = packed + iy * width;
                    __global const float *tap = weight + i * w_i + j * w_j;
#define ADD_TAP(mask) add_tap(sum, from, offset, plane, tap, w_output, w_c, channels, mask)
                    switch (mask) {
                        case 1: ADD_TAP(1); break;
                        case 2: ADD_TAP(2); break;
                        case 3: ADD_TAP(3); break;
                        case 4: ADD_TAP(4); break;
                        case 5: ADD_TAP(5); break;
                        case 6: ADD_TAP(6); break;
                        case 7: ADD_TAP(7); break;
                    }
                }
            }
            UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i)
                UNROLL for (int p = 0; p < TILE_PIXELS; ++p) waiting[i][filled + p] = sum[i][p];
            filled += min(TILE_PIXELS, out_width - ox);
            const int is_last = oy == out_height - 1 && ox + TILE_PIXELS >= out_width;
            if (filled + TILE_PIXELS <= WAITING && !is_last) continue;
            const int whole = is_last ? filled : filled & ~7;
            for (int i = 0; i < outputs_valid; ++i) {
                unpack_lanes(waiting[i], y + (long)i * out_plane + stored, image_stride, whole, images_valid);
                for (int p = whole; p < filled; ++p) waiting[i][p - whole] = waiting[i][p];
            }
            stored += whole;
            filled -= whole;
        }
}

/* A row's share of the weight gradient of 4 outputs and of the columns in `mask`: channels, or rows of the kernel. */
INLINE void add_row(
    float8 sum[TILE_OUTPUTS][TILE_PIXELS], __global const float8 *grad, const int g_offset[TILE_OUTPUTS],
    __global const float8 *x, const int x_offset[TILE_PIXELS], int count, int stride, const int mask)
{
    for (int p = 0; p < count; ++p) {
        float8 value[TILE_PIXELS];
        UNROLL for (int c = 0; c < TILE_PIXELS; ++c) if (mask >> c & 1) value[c] = x[x_offset[c]];
        UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o) {
            const float8 factor = grad[g_offset[o]];
            UNROLL for (int c = 0; c < TILE_PIXELS; ++c) if (mask >> c & 1) sum[o][c] += factor * value[c];
        }
        ++grad;
        x += stride;
    }
}

/* partial[chunk][O][C][kernel_h * kernel_w]: the weight gradient of a chunk of image blocks, lanes not yet added.
   A chunk is a fixed number of images, so the order of all sums is the same on any number of cores. Columns of a tile
   are three channels at one tap; with one channel they are three rows of the kernel. */
__kernel void weight_gradient(
    __global const float8 *packed, __global const float8 *packed_grad, __global float8 *partial,
    int blocks, int blocks_each, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int pad_h, int pad_w, int rows_each)
{
    const int o = get_global_id(0) * TILE_OUTPUTS, chunk = get_global_id(1);
    const int outputs_valid = min(TILE_OUTPUTS, outputs - o);
    const int plane = height * width, out_plane = out_height * out_width, taps = kernel_h * kernel_w;
    const int by_channel = channels > 1;
    const int columns = by_channel ? channels : kernel_h;
    const int column_x = by_channel ? plane : width, column_partial = by_channel ? taps : kernel_w;
    int g_offset[TILE_OUTPUTS];
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i) g_offset[i] = min(i, outputs_valid - 1) * out_plane;
    partial += ((long)chunk * outputs + o) * channels * taps;
    const int first_block = chunk * blocks_each, last_block = min(first_block + blocks_each, blocks);
    for (int block = first_block; block < last_block; ++block)
        for (int first_row = 0; first_row < out_height; first_row += rows_each)
            for (int column = 0; column < columns; column += TILE_PIXELS)
                for (int tap = 0; tap < (by_channel ? taps : kernel_w); ++tap) {
                    const int is_start = block == first_block && first_row == 0;
                    const int i = tap / kernel_w, j = tap % kernel_w;
                    const int columns_valid = min(TILE_PIXELS, columns - column);
                    __global float8 *to = partial + column * column_partial + tap;
                    float8 sum[TILE_OUTPUTS][TILE_PIXELS];
                    UNROLL for (int a = 0; a < TILE_OUTPUTS; ++a)
                        UNROLL for (int c = 0; c < TILE_PIXELS; ++c)
                            sum[a][c] = is_start || a >= outputs_valid || c >= columns_valid
                                ? (float8)0.0f : to[a * channels * taps + c * column_partial];
                    int x_offset[TILE_PIXELS];
                    UNROLL for (int c = 0; c < TILE_PIXELS; ++c) x_offset[c] = c * column_x;
                    /* The pixels whose ix = ox*stride + j - pad_w lies inside x. */
                    const int first = max(0, (pad_w - j + stride - 1) / stride);
                    const int last = min(out_width, (width - 1 + pad_w - j + stride) / stride);
                    __global const float8 *grad = packed_grad + ((long)block * outputs + o) * out_plane + first;
                    __global const float8 *x = packed + ((long)block * channels + (by_channel ? column : 0)) * plane
                        + first * stride + j - pad_w;
                    for (int oy = first_row; oy < min(first_row + rows_each, out_height); ++oy) {
                        const int iy = oy * stride - pad_h + (by_channel ? i : column);
                        int mask = 0;
                        UNROLL for (int c = 0; c < TILE_PIXELS; ++c) {
                            const int row = by_channel ? iy : iy + c;
                            if (c < columns_valid && row >= 0 && row < height) mask |= 1 << c;
                        }
                        __global const float8 *g = grad + oy * out_width;
                        __global const float8 *from = x + iy * width;
#define ADD_ROW(mask) add_row(sum, g, g_offset, from, x_offset, last - first, stride, mask)
                        switch (mask) {
                            case 1: ADD_ROW(1); break;
                            case 2: ADD_ROW(2); break;
                            case 3: ADD_ROW(3); break;
                            case 4: ADD_ROW(4); break;
                            case 6: ADD_ROW(6); break;
                            case 7: ADD_ROW(7); break;
                        }
                    }
                    UNROLL for (int a = 0; a < TILE_OUTPUTS; ++a)
                        UNROLL for (int c = 0; c < TILE_PIXELS; ++c)
                            if (a < outputs_valid && c < columns_valid)
                                to[a * channels * taps + c * column_partial] = sum[a][c];
                }
}

/* weight[i] = the sum of partial[chunk][i] over chunks, then lanes. */
__kernel void add_partials(__global const float8 *partial, __global float *weight, int count, int chunks)
{
    FOR_EACH(i, count) {
        float8 sum = partial[i];
        for (int chunk = 1; chunk < chunks; ++chunk) sum += partial[(long)chunk * count + i];
        const float4 half_sum = sum.lo + sum.hi;
        const float2 pair = half_sum.lo + half_sum.hi;
        weight[i] = pair.x + pair.y;
    }
}

/* bias[o] = the sum of grad[n, o, :] over images and pixels. */
__kernel void bias_gradient(__global const float *grad, __global float *bias, int images, int outputs, int plane)
{
    const int o = get_global_id(0);
    float8 sum = 0.0f;
    float rest = 0.0f;
    for (int n = 0; n < images; ++n) {
        __global const float *from = grad + ((long)n * outputs + o) * plane;
        int p = 0;
        for (; p + 8 <= plane; p += 8) sum += vload8(0, from + p);
        for (; p < plane; ++p) rest += from[p];
    }
    const float4 half_sum = sum.lo + sum.hi;
    const float2 pair = half_sum.lo + half_sum.hi;
    bias[o] = pair.x + pair.y + rest;
}

#else

/* Elsewhere tensors stay N C H W: a work-item computes OUTPUTS sums at one pixel, so neighbouring items read
   neighbouring pixels, and the work-group keeps the weights it needs in local memory. */

#define OUTPUTS 8
#define TAPS 64

__kernel void convolve(
    __global const float *x, __global const float *weight, __global const float *bias, __global float *y,
    int images, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int dilation, int pad_h, int pad_w,
    int w_first, int w_o, int w_c, int w_i, int w_j, int has_bias)
{
    __local float factors[TAPS][OUTPUTS];
    const int out_plane = out_height * out_width, taps = kernel_h * kernel_w, depth = channels * taps;
    const int pixel = get_global_id(0), o = get_group_id(1) * OUTPUTS;
    const int image = pixel / out_plane, oy = pixel % out_plane / out_width, ox = pixel % out_width;
    const int is_inside = image < images;
    x += (long)image * channels * height * width;
    float sum[OUTPUTS];
    UNROLL for (int i = 0; i < OUTPUTS; ++i) sum[i] = has_bias && o + i < outputs ? bias[o + i] : 0.0f;
    for (int first = 0; first < depth; first += TAPS) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = get_local_id(0); k < TAPS * OUTPUTS; k += get_local_size(0)) {
            const int tap = first + k / OUTPUTS, output = o + k % OUTPUTS;
            if (tap < depth && output < outputs)
                factors[k / OUTPUTS][k % OUTPUTS] = weight[w_first + output * w_o + tap / taps * w_c
                                                           + tap % taps / kernel_w * w_i + tap % kernel_w * w_j];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = first; is_inside && k < min(first + TAPS, depth); ++k) {
            const int y_scaled = oy * stride + k % taps / kernel_w - pad_h, iy = y_scaled / dilation;
            const int x_scaled = ox * stride + k % kernel_w - pad_w, ix = x_scaled / dilation;
            if (y_scaled < 0 || iy >= height || iy * dilation != y_scaled) continue;
            if (x_scaled < 0 || ix >= width || ix * dilation != x_scaled) continue;
            const float value = x[((long)(k / taps) * height + iy) * width + ix];
            UNROLL for (int i = 0; i < OUTPUTS; ++i) sum[i] += factors[k - first][i] * value;
        }
    }
    for (int i = 0; is_inside && i < OUTPUTS && o + i < outputs; ++i)
        y[((long)image * outputs + o + i) * out_plane + pixel % out_plane] = sum[i];
}

/* A work-group adds up one tap of one channel for OUTPUTS outputs. */
__kernel void weight_gradient(
    __global const float *x, __global const float *grad, __global float *weight,
    int images, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int pad_h, int pad_w)
{
    GROUP_SCRATCH(scratch);
    const int out_plane = out_height * out_width, taps = kernel_h * kernel_w;
    const int column = get_group_id(0), o = get_group_id(1) * OUTPUTS;
    const int c = column / taps, i = column % taps / kernel_w, j = column % kernel_w;
    float sum[OUTPUTS];
    UNROLL for (int k = 0; k < OUTPUTS; ++k) sum[k] = 0.0f;
    FOR_COLUMNS(pixel, images * out_plane) {
        const int image = pixel / out_plane, place = pixel % out_plane;
        const int iy = place / out_width * stride + i - pad_h, ix = place % out_width * stride + j - pad_w;
        if (iy < 0 || iy >= height || ix < 0 || ix >= width) continue;
        const float value = x[(((long)image * channels + c) * height + iy) * width + ix];
        UNROLL for (int k = 0; k < OUTPUTS; ++k)
            if (o + k < outputs) sum[k] += grad[((long)image * outputs + o + k) * out_plane + place] * value;
    }
    for (int k = 0; k < OUTPUTS; ++k) {
        const float total = GROUP_SUM(sum[k], scratch);
        if (GROUP_LEADER && o + k < outputs) weight[((long)(o + k) * channels + c) * taps + column % taps] = total;
    }
}

/* bias[o] = the sum of grad[n, o, :] over images and pixels. */
__kernel void bias_gradient(__global const float *grad, __global float *bias, int images, int outputs, int plane)
{
    GROUP_SCRATCH(scratch);
    const int o = get_group_id(0);
    float sum = 0.0f;
    FOR_COLUMNS(i, images * plane) sum += grad[((long)(i / plane) * outputs + o) * plane + i % plane];
    const float total = GROUP_SUM(sum, scratch);
    if (GROUP_LEADER) bias[o] = total;
}

#endif
