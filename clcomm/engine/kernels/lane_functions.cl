/* Kernels of a function of single elements, and of its gradient from the element that is kept for it: `v` in both. */

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
