/* out = op(x, y), for equal shapes and for a broadcast operand. `plan` holds, for each outer dimension, its
   size, x's stride and y's stride (three runs of `outer` ints), then x's and y's inner stride, each 0 or 1. */
#ifndef BROADCAST_LOOP
#ifdef ON_CPU
#define BROADCAST_LOOP(IN, OUT, EXPRESSION)                                                                         \
    const int x_step = plan[3 * outer], y_step = plan[3 * outer + 1];                                               \
    FOR_EACH(row, rows) {                                                                                           \
        __global const IN *xs = a, *ys = b;                                                                         \
        for (int d = outer - 1, rest = row; d >= 0; rest /= plan[d], --d) {                                         \
            xs += (rest % plan[d]) * plan[outer + d];                                                               \
            ys += (rest % plan[d]) * plan[2 * outer + d];                                                           \
        }                                                                                                           \
        __global OUT *to = out + row * inner;                                                                       \
        if (x_step && y_step)                                                                                       \
            for (int i = 0; i < inner; ++i) { const IN x = xs[i], y = ys[i]; to[i] = EXPRESSION; }                  \
        else if (x_step)                                                                                            \
            for (int i = 0; i < inner; ++i) { const IN x = xs[i], y = ys[0]; to[i] = EXPRESSION; }                  \
        else                                                                                                        \
            for (int i = 0; i < inner; ++i) { const IN x = xs[0], y = ys[i * y_step]; to[i] = EXPRESSION; }         \
    }
#else
#define BROADCAST_LOOP(IN, OUT, EXPRESSION)                                                                         \
    FOR_EACH(i, rows * inner) {                                                                                     \
        int x_at = (i % inner) * plan[3 * outer], y_at = (i % inner) * plan[3 * outer + 1];                         \
        for (int d = outer - 1, rest = i / inner; d >= 0; rest /= plan[d], --d) {                                   \
            x_at += (rest % plan[d]) * plan[outer + d];                                                             \
            y_at += (rest % plan[d]) * plan[2 * outer + d];                                                         \
        }                                                                                                           \
        const IN x = a[x_at], y = b[y_at];                                                                          \
        out[i] = EXPRESSION;                                                                                        \
    }
#endif

/* A kernel for equal shapes, and one for a broadcast operand; in a FUSED program a function. */
#ifdef FUSED
#define float_lanes lanes
#define int_lanes whole_lanes
#define PAIRWISE(NAME, IN, OUT, EXPRESSION) INLINE OUT##_lanes NAME##_lanes(IN##_lanes x, IN##_lanes y) { return EXPRESSION; }
#else
#define PAIRWISE(NAME, IN, OUT, EXPRESSION)                                                                         \
    __kernel void NAME(__global OUT *restrict out, __global const IN *a, __global const IN *b, int count) {         \
        FOR_ELEMENTS(i, count) {                                                                                    \
            const IN x = a[i], y = b[i];                                                                            \
            out[i] = EXPRESSION;                                                                                    \
        }                                                                                                           \
    }                                                                                                               \
    __kernel void NAME##_broadcast(__global OUT *restrict out, __global const IN *a, __global const IN *b,          \
                                   __global const int *plan, int outer, int rows, int inner) {                      \
        BROADCAST_LOOP(IN, OUT, EXPRESSION)                                                                         \
    }
#endif
#endif
