/* Activations y = x * gate(x), with their gradients as functions of x: GELU, whose gate is the normal distribution's
   cumulative function or its approximation by tanh, SiLU, whose gate is the sigmoid, and leaky ReLU, whose gate is a
   step. NaN passes through.
   Sources: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Elfwing, Uchibe and Doya, "Sigmoid-weighted linear
   units", 2018. */

#define DENSITY_AT_0 0.39894228040143268f   /* 1 / sqrt(2 pi) */
#define SQRT_2_OVER_PI 0.79788456080286536f /* sqrt(2 / pi) */
#define CUBIC 0.044715f

#include "lane_functions.cl"

INLINE lanes normal_cumulative(lanes v) {
    const lanes beyond = normal_beyond(v);
    return v > 0.0f ? 1.0f - beyond : beyond;
}

INLINE lanes normal_density(lanes v) { return DENSITY_AT_0 * bell(v); }

ACTIVATION(gelu, v * normal_cumulative(v))
GRADIENT(gelu, normal_cumulative(v) + v * normal_density(v))

/* 0.5 * (1 + tanh(u)) is logistic(2 u), which reaches 0 and 1 where tanh of some drivers stops an ulp before 1. */
INLINE lanes tanh_gate(lanes v) { return logistic(2.0f * SQRT_2_OVER_PI * (v + CUBIC * v * v * v)); }

INLINE lanes gelu_tanh_slope(lanes v) {
    const lanes gate = tanh_gate(v);
    return gate + v * gate * (1.0f - gate) * (2.0f * SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * v * v));
}

ACTIVATION(gelu_tanh, v * tanh_gate(v))
GRADIENT(gelu_tanh, gelu_tanh_slope(v))

ACTIVATION(silu, v / (1.0f + exponential(-v)))
GRADIENT(silu, logistic(v) * (1.0f + v * (1.0f - logistic(v))))

#ifndef FUSED
__kernel void leaky_relu(__global float *restrict y, __global const float *restrict x, float slope, int count) {
    FOR_ELEMENTS(i, count) y[i] = x[i] > 0.0f ? x[i] : slope * x[i];
}

__kernel void leaky_relu_grad(__global float *restrict dx, __global const float *restrict g,
                              __global const float *restrict x, float slope, int count) {
    FOR_ELEMENTS(i, count) dx[i] = x[i] > 0.0f ? g[i] : slope * g[i];
}
#endif
