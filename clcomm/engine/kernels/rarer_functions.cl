/* Functions of elements that drivers' own compute, apart from the others, whose program would take longer to build.
   Gradients are functions of the result v of e_to_x_less_1, else of the argument v. */

#include "lane_functions.cl"

ACTIVATION(e_to_x_less_1, expm1(v))
GRADIENT(e_to_x_less_1, v + 1.0f)
ACTIVATION(arc_tangent, atan(v))
GRADIENT(arc_tangent, 1.0f / (1.0f + v * v))
ACTIVATION(arc_sine, asin(v))
GRADIENT(arc_sine, 1.0f / sqrt(1.0f - v * v))
ACTIVATION(arc_cosine, acos(v))
GRADIENT(arc_cosine, -1.0f / sqrt(1.0f - v * v))

/* Functions of two elements, x and y. */
#ifdef FUSED
#define OF_TWO(NAME, RESULT) INLINE lanes NAME##_lanes(lanes x, lanes y) { return RESULT; }
#else
#define OF_TWO(NAME, RESULT)                                                                                    \
    __kernel void NAME(__global float *restrict out, __global const float *restrict a, __global const float *restrict b, \
                       int count) {                                                                             \
        FOR_LANES(i, count) {                                                                                   \
            const lanes x = load_lanes(a + i, count - i, 1.0f), y = load_lanes(b + i, count - i, 1.0f);         \
            store_lanes(RESULT, out + i, count - i);                                                            \
        }                                                                                                       \
    }
#endif

OF_TWO(power_of_two, pow(x, y))
OF_TWO(angle_of_two, atan2(x, y))
OF_TWO(length_of_two, hypot(x, y))
/* What a division leaves, with the divisor's sign. */
INLINE lanes with_sign_of(lanes rest, lanes y) {
    return (rest != 0.0f) & ((rest < 0.0f) ^ (y < 0.0f)) ? rest + y : rest;
}
OF_TWO(rest_of_two, with_sign_of(fmod(x, y), y))
/* The quotient rounded down, where a division leaves `rest` with the dividend's sign; y may be infinite. */
INLINE lanes rounded_down_from(lanes quotient, lanes rest, lanes y) {
    return (rest != 0.0f) & ((rest < 0.0f) ^ (y < 0.0f)) ? quotient - 1.0f : quotient;
}
OF_TWO(whole_quotient, y == 0.0f ? x / y : rounded_down_from(rint((x - fmod(x, y)) / y), fmod(x, y), y))
OF_TWO(times_logarithm, ((x == 0.0f) & (y == y)) ? (lanes)(0.0f) : x * log(y))

/* The logarithm of x, -100 where it is less. */
INLINE lanes limited(lanes logarithm) { return logarithm < -100.0f ? (lanes)(-100.0f) : logarithm; }
OF_TWO(entropy_of_two, (y - 1.0f) * limited(log1p(-x)) - y * limited(log(x)))
