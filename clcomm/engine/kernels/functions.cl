/* Functions of single elements. Gradients are functions of the result v where that is simpler, else of the argument v. */

#include "lane_functions.cl"

ACTIVATION(e_to_x, exponential(v))
GRADIENT(e_to_x, v)
ACTIVATION(logarithm, log(v))
GRADIENT(logarithm, 1.0f / v)
ACTIVATION(square_root, sqrt(v))
GRADIENT(square_root, 0.5f / v)
ACTIVATION(reciprocal_root, 1.0f / sqrt(v))
GRADIENT(reciprocal_root, -0.5f * v * v * v)
ACTIVATION(absolute, size_of(v))
GRADIENT(absolute, v > 0.0f ? (lanes)(1.0f) : v < 0.0f ? (lanes)(-1.0f) : (lanes)(0.0f))
ACTIVATION(squared, v * v)
GRADIENT(squared, 2.0f * v)
ACTIVATION(sine, sin(v))
GRADIENT(sine, cos(v))
ACTIVATION(cosine, cos(v))
GRADIENT(cosine, -sin(v))

/* Near 0 a polynomial of v^2 times v, fitted to the least relative error, 1.2e-9; beyond 1 by the normal distribution. */
INLINE lanes error_function_of(lanes v) {
    const lanes square = v * v, fourth = square * square;
    const lanes from_4 = (7.853857823647559e-05f * square - 0.0008010192541405559f) * square + 0.005188327748328447f;
    const lanes from_2 = from_4 * fourth + (-0.026853810995817184f * square + 0.1128358542919159f);
    const lanes near = (from_2 * fourth + (-0.3761262595653534f * square + 1.1283791065216064f)) * v;
    const lanes beyond = 2.0f * normal_beyond(1.41421356237309505f * v);
    return size_of(v) < 1.0f ? near : v > 0.0f ? 1.0f - beyond : beyond - 1.0f;
}

ACTIVATION(error_function, error_function_of(v))
GRADIENT(error_function, 1.12837916709551257f * exponential(-v * v))

INLINE lanes above_0(lanes v) { return v > 0.0f ? v : (lanes)(0.0f); }
ACTIVATION(softplus, above_0(v) + log_of_1_plus(exponential(-size_of(v))))
GRADIENT(softplus, 1.0f / (1.0f + exponential(-v)))

__kernel void power(__global float *restrict y, __global const float *restrict x, float exponent, int count) {
    FOR_LANES(i, count) {
        const lanes exponents = exponent;
        store_lanes(pow(load_lanes(x + i, count - i, 1.0f), exponents), y + i, count - i);
    }
}

__kernel void power_grad(__global float *restrict dx, __global const float *restrict g, __global const float *restrict x,
                         float exponent, int count) {
    FOR_LANES(i, count) {
        const int left = count - i;
        const lanes less = exponent - 1.0f;
        store_lanes(load_lanes(g + i, left, 0.0f) * exponent * pow(load_lanes(x + i, left, 1.0f), less), dx + i, left);
    }
}

/* NaN passes through. */
__kernel void clamped(__global float *restrict y, __global const float *restrict x, float least, float most, int count) {
    FOR_ELEMENTS(i, count) {
        const float at_least = x[i] < least ? least : x[i];
        y[i] = at_least > most ? most : at_least;
    }
}

__kernel void clamped_grad(__global float *restrict dx, __global const float *restrict g,
                           __global const float *restrict x, float least, float most, int count) {
    FOR_ELEMENTS(i, count) dx[i] = x[i] > most || x[i] < least ? 0.0f : g[i];
}
