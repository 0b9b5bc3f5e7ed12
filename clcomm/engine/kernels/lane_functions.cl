/* Functions of lanes, and kernels of a function of single elements, and of its gradient from the element that is kept
   for it: `v` in both. Programs that are FUSED have the functions in place of the kernels. */
#ifndef LANE_FUNCTIONS
#define LANE_FUNCTIONS

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

#define SQRT_HALF 0.70710678118654752f /* 1 / sqrt(2) */

INLINE lanes bell(lanes v) { return exponential(-0.5f * v * v); }

/* The normal distribution's part beyond |v|. Drivers' erf takes four times as long. With t = 1 / (1 + p |v|) it is a
   polynomial of t times exp(-v^2 / 2), 2e-7 off: the form of Abramowitz and Stegun, "Handbook of Mathematical
   Functions", 7.1.26, fitted anew with more terms. */
INLINE lanes normal_beyond(lanes v) {
    const lanes t = 1.0f / (1.0f + 0.47047f * SQRT_HALF * size_of(v));
    const lanes t2 = t * t, t4 = t2 * t2;
    const lanes from_6 = (-0.023450221866369247f * t + 0.1332746297121048f) * t
        - 0.28016719222068787f; /* in products that do not wait for each other */
    const lanes from_4 = from_6 * t2 + (0.23044772446155548f * t - 0.06063438951969147f);
    const lanes low = (0.12290185689926147f * t + 0.11154036223888397f) * t2
        + (0.13340067863464355f * t + 0.1326865553855896f);
    return (from_4 * t4 + low) * (t * bell(v));
}

#ifdef FUSED
#define GRADIENT_IS(NAME, RESULT) INLINE lanes NAME##_grad_lanes(lanes up, lanes v) { return RESULT; }
#define ACTIVATION(NAME, RESULT) INLINE lanes NAME##_lanes(lanes v) { return RESULT; }
#else
#define GRADIENT_IS(NAME, RESULT)                                                                            \
    __kernel void NAME##_grad(__global float *restrict dx, __global const float *restrict g,                 \
                              __global const float *restrict x, int count) {                                 \
        FOR_LANES(i, count) {                                                                                \
            const int left = count - i;                                                                      \
            const lanes v = load_lanes(x + i, left, 0.0f);                                                   \
            const lanes up = load_lanes(g + i, left, 0.0f);                                                  \
            store_lanes(RESULT, dx + i, left);                                                               \
        }                                                                                                    \
    }

#define ACTIVATION(NAME, RESULT)                                                                             \
    __kernel void NAME(__global float *restrict y, __global const float *restrict x, int count) {            \
        FOR_LANES(i, count) {                                                                                \
            const lanes v = load_lanes(x + i, count - i, 0.0f);                                              \
            store_lanes(RESULT, y + i, count - i);                                                           \
        }                                                                                                    \
    }
#endif
#define GRADIENT(NAME, SLOPE) GRADIENT_IS(NAME, up * (SLOPE))
#endif
