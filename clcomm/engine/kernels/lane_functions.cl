/* Functions of lanes, and kernels of a function of single elements, and of its gradient from the element that is kept
   for it: `v` in both. */

INLINE lanes logistic(lanes v) { return 1.0f / (1.0f + exponential(-v)); }

/* A kernel cannot be named `tanh`, which is a built-in function. */
INLINE lanes tangent(lanes v) {
    const lanes size = size_of(v), square = size * size;
    lanes sum = -0.005754786543548107f;
    sum = sum * square + 0.02068253792822361f;
    sum = sum * square - 0.05375269800424576f;
    sum = sum * square + 0.13331593573093414f;
    sum = sum * square - 0.3333328664302826f;
    const lanes small = size + size * square * sum, large = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return AS_LANES(AS_WHOLE(size < 0.62f ? small : large) ^ (AS_WHOLE(v) ^ AS_WHOLE(size)));
}

#define GRADIENT(NAME, SLOPE)                                                                                \
    __kernel void NAME##_grad(__global float *restrict dx, __global const float *restrict g,                 \
                              __global const float *restrict x, int count) {                                 \
        FOR_LANES(i, count) {                                                                                \
            const int left = count - i;                                                                      \
            const lanes v = load_lanes(x + i, left, 0.0f);                                                   \
            store_lanes(load_lanes(g + i, left, 0.0f) * (SLOPE), dx + i, left);                              \
        }                                                                                                    \
    }

#define ACTIVATION(NAME, RESULT)                                                                             \
    __kernel void NAME(__global float *restrict y, __global const float *restrict x, int count) {            \
        FOR_LANES(i, count) {                                                                                \
            const lanes v = load_lanes(x + i, count - i, 0.0f);                                              \
            store_lanes(RESULT, y + i, count - i);                                                           \
        }                                                                                                    \
    }
