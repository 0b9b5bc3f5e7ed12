/* Whole numbers near an element, and what a division leaves. */

#include "lane_functions.cl"

ACTIVATION(rounded_down, floor(v))
GRADIENT(rounded_down, (lanes)(0.0f))
ACTIVATION(rounded_up, ceil(v))
GRADIENT(rounded_up, (lanes)(0.0f))
ACTIVATION(rounded, rint(v))
GRADIENT(rounded, (lanes)(0.0f))
ACTIVATION(without_fraction, trunc(v))
GRADIENT(without_fraction, (lanes)(0.0f))
ACTIVATION(sign_of, v > 0.0f ? (lanes)(1.0f) : v < 0.0f ? (lanes)(-1.0f) : (lanes)(0.0f))
GRADIENT(sign_of, (lanes)(0.0f))
ACTIVATION(log_of_more, log1p(v))
GRADIENT(log_of_more, 1.0f / (1.0f + v))

#ifndef FUSED
/* With the divisor's sign, as Python's %. */
__kernel void rest_of_division(__global float *restrict y, __global const float *restrict x, float divisor, int count) {
    const int below = divisor < 0.0f;
    FOR_LANES(i, count) {
        const lanes divisors = divisor;
        const lanes rest = fmod(load_lanes(x + i, count - i, 1.0f), divisors);
        const lanes wrong = below ? -rest : rest;
        store_lanes(wrong < 0.0f ? rest + divisors : rest, y + i, count - i);
    }
}

__kernel void rest_of_division_grad(__global float *restrict dx, __global const float *restrict g,
                                    __global const float *restrict x, float divisor, int count) {
    FOR_LANES(i, count) store_lanes(load_lanes(g + i, count - i, 0.0f), dx + i, count - i);
}
#endif
