/* add, sub, mul, div of two tensors, or a tensor and a number; copies and accumulation for the tape. */

/* out = op(x, y), for equal shapes and for a broadcast operand. `plan` holds, for each outer dimension, its
   size, x's stride and y's stride (three runs of `outer` ints), then x's and y's inner stride, each 0 or 1. */
#ifdef ON_CPU
#define BROADCAST_LOOP(EXPRESSION)                                                                   \
    const int x_step = plan[3 * outer], y_step = plan[3 * outer + 1];                                \
    FOR_EACH(row, rows) {                                                                            \
        __global const float *xs = a, *ys = b;                                                       \
        for (int d = outer - 1, rest = row; d >= 0; rest /= plan[d], --d) {                          \
            xs += (rest % plan[d]) * plan[outer + d];                                                \
            ys += (rest % plan[d]) * plan[2 * outer + d];                                            \
        }                                                                                            \
        __global float *to = out + row * inner;                                                      \
        if (x_step && y_step)                                                                        \
            for (int i = 0; i < inner; ++i) { const float x = xs[i], y = ys[i]; to[i] = EXPRESSION; } \
        else if (x_step)                                                                             \
            for (int i = 0; i < inner; ++i) { const float x = xs[i], y = ys[0]; to[i] = EXPRESSION; } \
        else                                                                                         \
            for (int i = 0; i < inner; ++i) { const float x = xs[0], y = ys[i * y_step]; to[i] = EXPRESSION; } \
    }
#else
#define BROADCAST_LOOP(EXPRESSION)                                                                   \
    FOR_EACH(i, rows * inner) {                                                                      \
        int x_at = (i % inner) * plan[3 * outer], y_at = (i % inner) * plan[3 * outer + 1];          \
        for (int d = outer - 1, rest = i / inner; d >= 0; rest /= plan[d], --d) {                    \
            x_at += (rest % plan[d]) * plan[outer + d];                                              \
            y_at += (rest % plan[d]) * plan[2 * outer + d];                                          \
        }                                                                                            \
        const float x = a[x_at], y = b[y_at];                                                        \
        out[i] = EXPRESSION;                                                                         \
    }
#endif

#define BINARY(NAME, EXPRESSION)                                                                     \
    __kernel void NAME(__global float *restrict out, __global const float *a, __global const float *b, int count) { \
        FOR_ELEMENTS(i, count) {                                                                     \
            const float x = a[i], y = b[i];                                                          \
            out[i] = EXPRESSION;                                                                     \
        }                                                                                            \
    }                                                                                                \
    __kernel void NAME##_broadcast(__global float *restrict out, __global const float *a, __global const float *b, \
                                   __global const int *plan, int outer, int rows, int inner) {       \
        BROADCAST_LOOP(EXPRESSION)                                                                   \
    }

BINARY(add, x + y)
BINARY(sub, x - y)
BINARY(mul, x * y)
BINARY(div, x / y)

/* out = scale * x, x broadcast; the plan's strides of y are not used. */
__kernel void expand(__global float *restrict out, __global const float *a, __global const float *b,
                     __global const int *plan, int outer, int rows, int inner, float scale) {
    BROADCAST_LOOP(scale * x)
}

/* Gradient of x / y for y: -g x / y^2. */
__kernel void div_grad(__global float *restrict out, __global const float *g, __global const float *x,
                       __global const float *y, int count) {
    FOR_ELEMENTS(i, count) out[i] = -g[i] * (x[i] / y[i]) / y[i];
}

/* out = scale * x + shift */
__kernel void affine(__global float *restrict out, __global const float *x, float scale, float shift, int count) {
    FOR_ELEMENTS(i, count) out[i] = scale * x[i] + shift;
}

/* out = number / x, and its gradient -g out / x */
__kernel void divide_number(__global float *restrict out, __global const float *x, float number, int count) {
    FOR_ELEMENTS(i, count) out[i] = number / x[i];
}

__kernel void divide_number_grad(__global float *restrict dx, __global const float *g, __global const float *out,
                                 __global const float *x, int count) {
    FOR_ELEMENTS(i, count) dx[i] = -g[i] * out[i] / x[i];
}

__kernel void copy(__global float *restrict out, __global const float *restrict x, int count) {
    FOR_ELEMENTS(i, count) out[i] = x[i];
}

/* x may be total itself */
__kernel void add_into(__global float *total, __global const float *x, int count) {
    FOR_ELEMENTS(i, count) total[i] += x[i];
}

__kernel void fill(__global float *out, float value, int count) {
    FOR_ELEMENTS(i, count) out[i] = value;
}

/* The mask that attention adds to its scores, from whether a query sees a key. */
__kernel void mask_of_flags(__global float *restrict mask, __global const int *restrict flags, int count) {
    FOR_ELEMENTS(i, count) mask[i] = flags[i] ? 0.0f : -INFINITY;
}
