/* Max and average pooling of x[planes][height][width] to y[planes][out_height][out_width]; a plane is one channel of
   one image. Windows may overlap and reach into the padding, which a maximum ignores and an average counts as
   zeros. On a CPU a work-item takes whole planes; elsewhere it takes single elements. */

typedef struct {
    int height, width, out_height, out_width, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
} Window;

#define WINDOW_ARGS \
    int height, int width, int out_height, int out_width, int kernel_h, int kernel_w, int stride_h, int stride_w, \
    int pad_h, int pad_w
#define WINDOW {height, width, out_height, out_width, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w}

INLINE int first_row(Window w, int oy) { return larger(0, oy * w.stride_h - w.pad_h); }
INLINE int last_row(Window w, int oy) { return smaller(w.height, oy * w.stride_h - w.pad_h + w.kernel_h); }
INLINE int first_column(Window w, int ox) { return larger(0, ox * w.stride_w - w.pad_w); }
INLINE int last_column(Window w, int ox) { return smaller(w.width, ox * w.stride_w - w.pad_w + w.kernel_w); }

/* The place of the window's largest element, the first of equals; NaN is larger than all numbers, and of several NaN
   the last one counts, as in PyTorch. */
INLINE int largest(__global const float *x, Window w, int oy, int ox)
{
    int place = first_row(w, oy) * w.width + first_column(w, ox);
    float best = x[place];
    for (int iy = first_row(w, oy); iy < last_row(w, oy); ++iy)
        for (int ix = first_column(w, ox); ix < last_column(w, ox); ++ix) {
            const float value = x[iy * w.width + ix];
            if (value > best || value != value) {
                best = value;
                place = iy * w.width + ix;
            }
        }
    return place;
}

INLINE float average(__global const float *x, Window w, int oy, int ox)
{
    float sum = 0.0f;
    for (int iy = first_row(w, oy); iy < last_row(w, oy); ++iy)
        for (int ix = first_column(w, ox); ix < last_column(w, ox); ++ix) sum += x[iy * w.width + ix];
    return sum / (w.kernel_h * w.kernel_w);
}

__kernel void average_pool(__global const float *x, __global float *y, int count, WINDOW_ARGS)
{
    const Window w = WINDOW;
    const int out_plane = out_height * out_width;
    FOR_EACH(i, count)
        y[i] = average(x + (long)(i / out_plane) * height * width, w, i % out_plane / out_width, i % out_width);
}

#ifdef ON_CPU

typedef int8 __attribute__((aligned(4))) unaligned_int8;

/* A row of at least eight 2 x 2 windows, eight at a time; the last eight may repeat earlier ones. */
INLINE void pairs_row(__global const float *x, __global float *y, __global int *places, Window w, int oy)
{
    const int8 columns = (int8)(0, 2, 4, 6, 8, 10, 12, 14);
    for (int next = 0; next < w.out_width; next += 8) {
        const int ox = smaller(next, w.out_width - 8), corner = 2 * oy * w.width + 2 * ox;
        float8 best;
        int8 place;
        UNROLL for (int row = 0; row < 2; ++row) {
            const float8 left = load8(x + corner + row * w.width), right = load8(x + corner + row * w.width + 8);
            UNROLL for (int column = 0; column < 2; ++column) {
                const float8 value = column ? (float8)(left.odd, right.odd) : (float8)(left.even, right.even);
                const int8 at = columns + (corner + row * w.width + column);
                const int8 is_larger = (value > best) | (value != value) | (row + column == 0 ? -1 : 0);
                best = is_larger ? value : best;
                place = is_larger ? at : place;
            }
        }
        store8(best, y + ox);
        *(__global unaligned_int8 *)(places + ox) = place;
    }
}

/* places[i] is the index of the maximum in its plane. */
__kernel void max_pool(__global const float *x, __global float *y, __global int *places, int rows, WINDOW_ARGS)
{
    const Window w = WINDOW;
    const int is_pairs = kernel_h == 2 && kernel_w == 2 && stride_h == 2 && stride_w == 2 && pad_h == 0 && pad_w == 0
        && out_width >= 8;
    FOR_ROWS(row, rows) {
        __global const float *plane = x + (long)(row / out_height) * height * width;
        const int oy = row % out_height, first = row * out_width;
        if (is_pairs) pairs_row(plane, y + first, places + first, w, oy);
        else for (int ox = 0; ox < out_width; ++ox) {
            const int place = largest(plane, w, oy, ox);
            places[first + ox] = place;
            y[first + ox] = plane[place];
        }
    }
}

__kernel void max_pool_gradient(
    __global const float *grad, __global const int *places, __global float *dx, int planes, WINDOW_ARGS)
{
    FOR_ROWS(plane, planes) {
        __global float *to = dx + (long)plane * height * width;
        for (int i = 0; i < height * width; ++i) to[i] = 0.0f;
        for (int i = plane * out_height * out_width; i < (plane + 1) * out_height * out_width; ++i)
            to[places[i]] += grad[i];
    }
}

__kernel void average_pool_gradient(__global const float *grad, __global float *dx, int planes, WINDOW_ARGS)
{
    const Window w = WINDOW;
    FOR_ROWS(plane, planes) {
        __global float *to = dx + (long)plane * height * width;
        __global const float *from = grad + (long)plane * out_height * out_width;
        for (int i = 0; i < height * width; ++i) to[i] = 0.0f;
        for (int i = 0; i < out_height * out_width; ++i) {
            const int oy = i / out_width, ox = i % out_width;
            const float share = from[i] / (kernel_h * kernel_w);
            for (int iy = first_row(w, oy); iy < last_row(w, oy); ++iy)
                for (int ix = first_column(w, ox); ix < last_column(w, ox); ++ix) to[iy * width + ix] += share;
        }
    }
}

#else

/* places[i] is the index of the maximum in its plane. */
__kernel void max_pool(
    __global const float *x, __global float *y, __global int *places, int count, WINDOW_ARGS)
{
    const Window w = WINDOW;
    const int out_plane = out_height * out_width;
    FOR_EACH(i, count) {
        __global const float *plane = x + (long)(i / out_plane) * height * width;
        const int place = largest(plane, w, i % out_plane / out_width, i % out_width);
        places[i] = place;
        y[i] = plane[place];
    }
}

/* Each element of dx is summed over the windows that cover it, so no two work-items write the same element. */

#define FOR_WINDOWS(oy, ox, iy, ix) \
    for (int oy = first_window(iy, kernel_h, stride_h, pad_h), \
             oy##_last = last_window(iy, stride_h, pad_h, out_height); \
         oy <= oy##_last; ++oy) \
        for (int ox = first_window(ix, kernel_w, stride_w, pad_w), \
                 ox##_last = last_window(ix, stride_w, pad_w, out_width); \
             ox <= ox##_last; ++ox)

INLINE int last_window(int i, int stride, int pad, int count) { return smaller((i + pad) / stride, count - 1); }

INLINE int first_window(int i, int kernel_size, int stride, int pad)
{
    return larger(0, (i + pad - kernel_size + stride) / stride);
}

__kernel void max_pool_gradient(
    __global const float *grad, __global const int *places, __global float *dx, int planes, WINDOW_ARGS)
{
    FOR_EACH(i, planes * height * width) {
        const int plane = i / (height * width), place = i % (height * width), iy = place / width, ix = place % width;
        float sum = 0.0f;
        FOR_WINDOWS(oy, ox, iy, ix) {
            const int window = (plane * out_height + oy) * out_width + ox;
            if (places[window] == place) sum += grad[window];
        }
        dx[i] = sum;
    }
}

__kernel void average_pool_gradient(__global const float *grad, __global float *dx, int planes, WINDOW_ARGS)
{
    FOR_EACH(i, planes * height * width) {
        const int plane = i / (height * width), iy = i / width % height, ix = i % width;
        float sum = 0.0f;
        FOR_WINDOWS(oy, ox, iy, ix)
            sum += grad[(plane * out_height + oy) * out_width + ox] / (kernel_h * kernel_w);
        dx[i] = sum;
    }
}

#endif

/* Adaptive average pooling: windows from i * size / outputs, rounded down, to (i + 1) * size / outputs, rounded up; they
   may overlap. An element lies in the windows from r * outputs / size, rounded down, to (r + 1) * outputs / size, rounded
   up. So the two are one function, with the sizes exchanged. */

INLINE int first_of(int i, int from, int to) { return (int)((long)i * from / to); }
INLINE int end_of(int i, int from, int to) { return (int)(((long)(i + 1) * from + to - 1) / to); }

#define ADAPTIVE_ARGS int planes, int height, int width, int out_height, int out_width

__kernel void adaptive_average_pool(__global float *restrict y, __global const float *restrict x, ADAPTIVE_ARGS)
{
    FOR_EACH(i, planes * out_height * out_width) {
        const int oy = i / out_width % out_height, ox = i % out_width;
        __global const float *plane = x + (long)(i / (out_height * out_width)) * height * width;
        const int top = first_of(oy, height, out_height), bottom = end_of(oy, height, out_height);
        const int left = first_of(ox, width, out_width), right = end_of(ox, width, out_width);
        float sum = 0.0f;
        for (int iy = top; iy < bottom; ++iy)
            for (int ix = left; ix < right; ++ix) sum += plane[iy * width + ix];
        y[i] = sum / ((bottom - top) * (right - left));
    }
}

__kernel void adaptive_average_pool_gradient(
    __global float *restrict dx, __global const float *restrict grad, ADAPTIVE_ARGS)
{
    FOR_EACH(i, planes * height * width) {
        const int iy = i / width % height, ix = i % width;
        __global const float *plane = grad + (long)(i / (height * width)) * out_height * out_width;
        float sum = 0.0f;
        for (int oy = first_of(iy, out_height, height); oy < end_of(iy, out_height, height); ++oy) {
            const int rows = end_of(oy, height, out_height) - first_of(oy, height, out_height);
            for (int ox = first_of(ix, out_width, width); ox < end_of(ix, out_width, width); ++ox)
                sum += plane[oy * out_width + ox] /
                       (rows * (end_of(ox, width, out_width) - first_of(ox, width, out_width)));
        }
        dx[i] = sum;
    }
}
