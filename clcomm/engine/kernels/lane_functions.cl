/* Functions of lanes that expressions of ops/elements.py call. */
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
/* Near 0 a polynomial of v^2 times v, fitted to the least relative error, 1.2e-9; beyond 1 by the normal distribution. */
INLINE lanes error_function_of(lanes v) {
    const lanes square = v * v, fourth = square * square;
    const lanes from_4 = (7.853857823647559e-05f * square - 0.0008010192541405559f) * square + 0.005188327748328447f;
    const lanes from_2 = from_4 * fourth + (-0.026853810995817184f * square + 0.1128358542919159f);
    const lanes near = (from_2 * fourth + (-0.3761262595653534f * square + 1.1283791065216064f)) * v;
    const lanes beyond = 2.0f * normal_beyond(1.41421356237309505f * v);
    return size_of(v) < 1.0f ? near : v > 0.0f ? 1.0f - beyond : beyond - 1.0f;
}

INLINE lanes above_0(lanes v) { return v > 0.0f ? v : (lanes)(0.0f); }

/* tanh(softplus(v)) is n / (n + 2) with n = e^v (e^v + 2), 1 from 20 on. */
INLINE lanes mish_gate(lanes v) {
    const lanes power = exponential(v > 20.0f ? (lanes)(20.0f) : v), n = power * (power + 2.0f);
    return n / (n + 2.0f);
}

/* v to a small whole power, by squares. */
INLINE lanes whole_power_of(lanes v, float number) {
    const int exponent = (int)number;
    lanes power = 1.0f;
    for (int left = exponent < 0 ? -exponent : exponent; left; left >>= 1) {
        if (left & 1) power *= v;
        v *= v;
    }
    return exponent < 0 ? 1.0f / power : power;
}

INLINE lanes power_of(lanes v, float exponent) {
    const lanes exponents = exponent;
    return pow(v, exponents);
}

/* What a division leaves, with the divisor's sign. */
INLINE lanes with_sign_of(lanes rest, lanes y) {
    return (rest != 0.0f) & ((rest < 0.0f) ^ (y < 0.0f)) ? rest + y : rest;
}
/* The quotient rounded down, where a division leaves `rest` with the dividend's sign; y may be infinite. */
INLINE lanes rounded_down_from(lanes quotient, lanes rest, lanes y) {
    return (rest != 0.0f) & ((rest < 0.0f) ^ (y < 0.0f)) ? quotient - 1.0f : quotient;
}

/* With the divisor's sign, as Python's %. */
INLINE lanes rest_of_division(lanes x, float divisor) {
    const lanes divisors = divisor, rest = fmod(x, divisors), wrong = divisor < 0.0f ? -rest : rest;
    return wrong < 0.0f ? rest + divisors : rest;
}
#endif
