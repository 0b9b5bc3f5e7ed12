/* add, sub, mul, div of two tensors, or a tensor and a number; copies and accumulation for the tape. */

#include "broadcast.cl"

#define BINARY(NAME, EXPRESSION) PAIRWISE(NAME, float, float, EXPRESSION)

BINARY(add, x + y)
BINARY(sub, x - y)
BINARY(mul, x * y)
BINARY(div, x / y)
/* NaN of either one is the result. */
BINARY(maximum, x != x || x > y ? x : y)
BINARY(minimum, x != x || x < y ? x : y)

#ifndef FUSED
/* out = x / divisor, x broadcast; the plan's strides of y are not used. */
__kernel void expand(__global float *restrict out, __global const float *a, __global const float *b,
                     __global const int *plan, int outer, int rows, int inner, float divisor) {
    BROADCAST_LOOP(float, float, x / divisor)
}

/* out = scale * x + shift */
__kernel void affine(__global float *restrict out, __global const float *x, float scale, float shift, int count) {
    FOR_ELEMENTS(i, count) out[i] = scale * x[i] + shift;
}

/* out = x / number: not its product with the reciprocal, which is rounded twice */
__kernel void divide_by(__global float *restrict out, __global const float *x, float number, int count) {
    FOR_ELEMENTS(i, count) out[i] = x[i] / number;
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
#endif
