/* The kernels of conv2d.cl and conv2d_weights.cl for GPUs. Tensors stay N C H W: a work-item computes OUTPUTS sums at
   one pixel, so neighbouring items read neighbouring pixels, and the work-group keeps its weights in local memory.
   Channels and outputs are those of a group of `groups`; taps of a dilated kernel are apart_h rows and apart_w columns
   apart. */

#define TAPS 64

__kernel void convolve(
    __global const float *x, __global const float *weight, __global const float *bias, __global float *y,
    int images, int channels, int height, int width, int outputs, int out_height, int out_width, int kernel_h,
    int kernel_w, int stride, int dilation, int pad_h, int pad_w, int apart_h, int apart_w, int groups, int w_first,
    int w_o, int w_c, int w_i, int w_j, int has_bias)
{
    __local float factors[TAPS][OUTPUTS];
    const int out_plane = out_height * out_width, taps = kernel_h * kernel_w, depth = channels * taps;
    const int tiles = (outputs + OUTPUTS - 1) / OUTPUTS, group = get_group_id(1) / tiles;
    const int pixel = get_global_id(0), o = (get_group_id(1) - group * tiles) * OUTPUTS;
    const int image = pixel / out_plane, oy = pixel % out_plane / out_width, ox = pixel % out_width;
    const int is_inside = image < images;
    x += ((long)image * groups + group) * channels * height * width;
    weight += (long)group * outputs * depth;
    bias += group * outputs;
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
            const int y_scaled = oy * stride + k % taps / kernel_w * apart_h - pad_h, iy = y_scaled / dilation;
            const int x_scaled = ox * stride + k % kernel_w * apart_w - pad_w, ix = x_scaled / dilation;
            if (y_scaled < 0 || iy >= height || iy * dilation != y_scaled) continue;
            if (x_scaled < 0 || ix >= width || ix * dilation != x_scaled) continue;
            const float value = x[((long)(k / taps) * height + iy) * width + ix];
            UNROLL for (int i = 0; i < OUTPUTS; ++i) sum[i] = MULTIPLY_ADD(factors[k - first][i], value, sum[i]);
        }
    }
    for (int i = 0; is_inside && i < OUTPUTS && o + i < outputs; ++i)
        y[(((long)image * groups + group) * outputs + o + i) * out_plane + pixel % out_plane] = sum[i];
}

/* A work-group sums one tap of one channel for OUTPUTS outputs of a group. */
__kernel void weight_gradient(
    __global const float *x, __global const float *grad, __global float *weight,
    int images, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int pad_h, int pad_w, int apart_h, int apart_w, int groups)
{
    GROUP_SCRATCH(scratch);
    const int out_plane = out_height * out_width, taps = kernel_h * kernel_w;
    const int tiles = (outputs + OUTPUTS - 1) / OUTPUTS, group = get_group_id(1) / tiles;
    const int column = get_group_id(0), o = (get_group_id(1) - group * tiles) * OUTPUTS;
    const int c = column / taps, i = column % taps / kernel_w, j = column % kernel_w;
    float sum[OUTPUTS];
    UNROLL for (int k = 0; k < OUTPUTS; ++k) sum[k] = 0.0f;
    FOR_COLUMNS(pixel, images * out_plane) {
        const int image = pixel / out_plane, place = pixel % out_plane;
        const int iy = place / out_width * stride + i * apart_h - pad_h;
        const int ix = place % out_width * stride + j * apart_w - pad_w;
        __global const float *from = grad + ((long)image * groups + group) * outputs * out_plane;
        if (iy < 0 || iy >= height || ix < 0 || ix >= width) continue;
        const float value = x[((((long)image * groups + group) * channels + c) * height + iy) * width + ix];
        UNROLL for (int k = 0; k < OUTPUTS; ++k)
            if (o + k < outputs)
                sum[k] = MULTIPLY_ADD(from[(long)(o + k) * out_plane + place], value, sum[k]);
    }
    for (int k = 0; k < OUTPUTS; ++k) {
        const float total = GROUP_SUM(sum[k], scratch);
        if (GROUP_LEADER && o + k < outputs)
            weight[(((long)group * outputs + o + k) * channels + c) * taps + column % taps] = total;
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
