/* ReLU, sigmoid and tanh with their gradients, as functions of the result y. NaN passes through. */

#include "lane_functions.cl"

ACTIVATION(sigmoid, logistic(v))
ACTIVATION(hyperbolic_tangent, tangent(v))

#ifndef FUSED
__kernel void relu(__global float *restrict y, __global const float *restrict x, int count) {
    FOR_ELEMENTS(i, count) y[i] = x[i] <= 0.0f ? 0.0f : x[i];
}

__kernel void relu_grad(__global float *restrict dx, __global const float *restrict g, __global const float *restrict y,
                        int count) {
    FOR_ELEMENTS(i, count) dx[i] = y[i] <= 0.0f ? 0.0f : g[i];
}

__kernel void sigmoid_grad(__global float *restrict dx, __global const float *restrict g,
                           __global const float *restrict y, int count) {
    FOR_ELEMENTS(i, count) dx[i] = g[i] * y[i] * (1.0f - y[i]);
}

__kernel void hyperbolic_tangent_grad(__global float *restrict dx, __global const float *restrict g,
                                      __global const float *restrict y, int count) {
    FOR_ELEMENTS(i, count) dx[i] = g[i] * (1.0f - y[i] * y[i]);
}
#endif
