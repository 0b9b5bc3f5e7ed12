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
GRADIENT_IS(squared, 2.0f * up * v) /* 2 v may be infinite where up is 0 */

/* sin(v), or cos(v) with `quarters` 1, less than 2 ulp off: v less the nearest multiple of pi / 2, in three parts, then
   the polynomials of Cephes' sinf and cosf (Moshier, 1992). Far from 0 that loses digits, and drivers' functions, which
   take twice as long, serve; PoCL's are wrong of tiny lanes beside huge ones. */
INLINE lanes turned_by(lanes v, int quarters) {
    const lanes shifted = v * 0.63661977f + 12582912.0f; /* its lowest bits are the multiple */
    const lanes n = shifted - 12582912.0f;
    const lanes rest = ((v - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.54978995489188216e-8f;
    const lanes square = rest * rest;
    const lanes odd = ((-1.9515295891e-4f * square + 8.3321608736e-3f) * square - 1.6666654611e-1f) * (square * rest) + rest;
    const lanes even = ((2.443315711809948e-5f * square - 1.388731625493765e-3f) * square + 4.166664568298827e-2f)
            * (square * square) + (1.0f - 0.5f * square);
    const whole_lanes at = AS_WHOLE(shifted) + quarters, is_even = at << 31;
    return AS_LANES(AS_WHOLE(is_even ? even : odd) ^ ((at & 2) << 30));
}

INLINE lanes sine_of(lanes v) {
    const lanes near = turned_by(v, 0);
    return lanes_max(size_of(v)) < 8192.0f ? near : size_of(v) < 8192.0f ? near : sin(v);
}
INLINE lanes cosine_of(lanes v) {
    const lanes near = turned_by(v, 1);
    return lanes_max(size_of(v)) < 8192.0f ? near : size_of(v) < 8192.0f ? near : cos(v);
}
ACTIVATION(sine, sine_of(v))
GRADIENT(sine, cosine_of(v))
ACTIVATION(cosine, cosine_of(v))
GRADIENT(cosine, -sine_of(v))

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

ACTIVATION(minus_softplus_of_minus, -above_0(-v) - log_of_1_plus(exponential(-size_of(v))))
GRADIENT(minus_softplus_of_minus, 1.0f / (1.0f + exponential(v)))

/* tanh(softplus(v)) is n / (n + 2) with n = e^v (e^v + 2), 1 from 20 on. */
INLINE lanes mish_gate(lanes v) {
    const lanes power = exponential(v > 20.0f ? (lanes)(20.0f) : v), n = power * (power + 2.0f);
    return n / (n + 2.0f);
}
INLINE lanes mish_slope(lanes v) {
    const lanes gate = mish_gate(v);
    return gate + v * (1.0f - gate * gate) * logistic(v);
}
ACTIVATION(mish, v * mish_gate(v))
GRADIENT(mish, mish_slope(v))

ACTIVATION(hard_swish, v * (above_0(v + 3.0f < 6.0f ? v + 3.0f : (lanes)(6.0f)) / 6.0f))
GRADIENT(hard_swish, v <= -3.0f ? (lanes)(0.0f) : v < 3.0f ? v / 3.0f + 0.5f : (lanes)(1.0f))

/* Functions of an element v and two settings, a and b. NaN passes through, as through PyTorch's. */
#ifdef FUSED
#define WITH_SETTINGS(NAME, RESULT, SLOPE)                                      \
    INLINE lanes NAME##_lanes(lanes v, float a, float b) { return RESULT; }     \
    INLINE lanes NAME##_grad_lanes(lanes g, lanes v, float a, float b) { return g * (SLOPE); }
#else
#define WITH_SETTINGS(NAME, RESULT, SLOPE)                                                                      \
    __kernel void NAME(__global float *restrict y, __global const float *restrict x, float a, float b, int count) { \
        FOR_LANES(i, count) {                                                                                   \
            const lanes v = load_lanes(x + i, count - i, 1.0f);                                                 \
            store_lanes(RESULT, y + i, count - i);                                                              \
        }                                                                                                       \
    }                                                                                                           \
    __kernel void NAME##_grad(__global float *restrict dx, __global const float *restrict g,                    \
                              __global const float *restrict x, float a, float b, int count) {                  \
        FOR_LANES(i, count) {                                                                                   \
            const int left = count - i;                                                                         \
            const lanes v = load_lanes(x + i, left, 1.0f);                                                      \
            store_lanes(load_lanes(g + i, left, 0.0f) * (SLOPE), dx + i, left);                                 \
        }                                                                                                       \
    }
#endif

WITH_SETTINGS(exponential_linear, v > 0.0f ? v : a * (exponential(v) - 1.0f), v <= 0.0f ? a * exponential(v) : (lanes)(1.0f))
WITH_SETTINGS(hard_tangent, v < a ? (lanes)(a) : v > b ? (lanes)(b) : v, ((v > a) & (v < b)) ? (lanes)(1.0f) : (lanes)(0.0f))
WITH_SETTINGS(above_threshold, v <= a ? (lanes)(b) : v, v <= a ? (lanes)(0.0f) : (lanes)(1.0f))

/* v to a small whole power, by squares. */
INLINE lanes whole_power_of(lanes v, int exponent) {
    lanes power = 1.0f;
    for (int left = exponent < 0 ? -exponent : exponent; left; left >>= 1) {
        if (left & 1) power *= v;
        v *= v;
    }
    return exponent < 0 ? 1.0f / power : power;
}
WITH_SETTINGS(whole_power, whole_power_of(v, (int)a), a * whole_power_of(v, (int)a - 1))

#ifndef FUSED
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
        const lanes slope = exponent == 0.0f ? (lanes)(0.0f) : exponent * pow(load_lanes(x + i, left, 1.0f), less);
        store_lanes(load_lanes(g + i, left, 0.0f) * slope, dx + i, left);
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
    FOR_ELEMENTS(i, count) dx[i] = x[i] >= least && x[i] <= most ? g[i] : 0.0f;
}
#endif
