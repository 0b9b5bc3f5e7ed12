/* Comparisons, booleans and what is chosen by them. Booleans are ints, 1 where true. */

#include "broadcast.cl"

#ifdef FUSED
#define COMPARISON(NAME, IN, EXPRESSION) PAIRWISE(NAME, IN, int, (EXPRESSION) & 1) /* of vectors, -1 is true */
#else
#define COMPARISON(NAME, IN, EXPRESSION) PAIRWISE(NAME, IN, int, EXPRESSION)
#endif

COMPARISON(equal, float, x == y)
COMPARISON(not_equal, float, x != y)
COMPARISON(less, float, x < y)
COMPARISON(less_equal, float, x <= y)
COMPARISON(equal_int, int, x == y)
COMPARISON(not_equal_int, int, x != y)
COMPARISON(less_int, int, x < y)
COMPARISON(less_equal_int, int, x <= y)
COMPARISON(both, int, x & y)
COMPARISON(either, int, x | y)
PAIRWISE(first, int, int, x)

#ifndef FUSED
/* out = flag ? x : y */
__kernel void chosen(__global float *restrict out, __global const int *restrict flags, __global const float *x,
                     __global const float *y, int count) {
    FOR_ELEMENTS(i, count) out[i] = flags[i] ? x[i] : y[i];
}

/* out = flag is `where` ? value : x */
__kernel void masked(__global float *restrict out, __global const float *x, __global const int *restrict flags, int where,
                     float value, int count) {
    FOR_ELEMENTS(i, count) out[i] = (flags[i] != 0) == where ? value : x[i];
}

__kernel void float_of_int(__global float *restrict out, __global const int *restrict x, int count) {
    FOR_ELEMENTS(i, count) out[i] = (float)x[i];
}

/* What int32 has not is noted in `outside`, and the least number. */
__kernel void int_of_float(__global int *restrict out, __global const float *restrict x, __global int *restrict outside,
                           int count) {
    int missed = 0;
    FOR_ELEMENTS(i, count) {
        const int fits = x[i] >= -2147483648.0f && x[i] < 2147483648.0f;
        out[i] = fits ? (int)x[i] : -2147483647 - 1;
        missed |= !fits;
    }
    if (missed) note_outside(outside, 0, 0);
}
#endif
