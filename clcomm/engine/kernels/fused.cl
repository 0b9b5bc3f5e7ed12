/* The kernels of elements as functions of lanes, from which chains are made that are one kernel: clcomm/engine/fusion.
   Those of macros come with their files; the others stand here, by the same expressions. */
#define FUSED
#include "elementwise.cl"
#include "compare.cl"
#include "lane_functions.cl"

/* A tensor that is repeated: each of its elements stands `every` times, and all that again and again, in a `cycle`.
   repeated_at is where element i of the result is in that, from where the last one was, or -1: without a division. */
#ifdef ON_CPU
#define CONVERTED(x) __builtin_convertvector(x, lanes)
INLINE int repeated_at(int before, int i, int cycle) {
    const int at = before + LANES;
    return before < 0 || at - cycle >= cycle ? i % cycle : at < cycle ? at : at - cycle;
}

INLINE lanes repeated_lanes(__global const float *from, int at, int left, int every, int cycle) {
    lanes value = 0.0f;
    for (int lane = 0; lane < LANES && lane < left; ++lane) ((float *)&value)[lane] = from[(at + lane) % cycle / every];
    return value;
}

/* Zeros in the lanes beyond the last element, which a function that looks at all lanes must not see. */
INLINE lanes present_lanes(lanes value, int left) {
    for (int lane = left; lane < LANES; ++lane) ((float *)&value)[lane] = 0.0f;
    return value;
}
#else
#define CONVERTED(x) ((float)(x))
#define repeated_at(before, i, cycle) ((i) % (cycle))
#define repeated_lanes(from, at, left, every, cycle) ((from)[(at) / (every)])
#define present_lanes(value, left) (value)
#endif

/* A value between two calls. Compilers other than PoCL's contract products and sums also across them: bits that a
   number of unknown value, 0, might change keep these apart. */
#if defined(ON_CPU) && !defined(cl_intel_vec_len_hint)
#define FLOATS(name, value) const lanes name = (value)
#else
#define FLOATS(name, value) const lanes name = AS_LANES(AS_WHOLE(value) ^ nothing)
#endif

INLINE lanes fill_lanes(float value) { return (lanes)(value); }
INLINE lanes add_into_lanes(lanes x, lanes y) { return x + y; }
INLINE lanes affine_lanes(lanes x, float scale, float shift) { return scale * x + shift; }
INLINE lanes expand_lanes(lanes x, float divisor) { return x / divisor; }
INLINE lanes divide_by_lanes(lanes x, float number) { return x / number; }

INLINE lanes chosen_lanes(whole_lanes flags, lanes x, lanes y) { return flags != 0 ? x : y; }
INLINE lanes masked_lanes(lanes x, whole_lanes flags, int where, float value) {
    return where ? (flags != 0 ? (lanes)(value) : x) : (flags != 0 ? x : (lanes)(value));
}
INLINE lanes float_of_int_lanes(whole_lanes x) { return CONVERTED(x); }
