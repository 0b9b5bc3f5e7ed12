/* Included before every program. ON_CPU: a work-item processes one long run of elements, or of rows, which vectorises;
   elsewhere there is a work-item for each element and a work-group of ROW_GROUP items for each row.

   `lanes` is the vector type of loops that compilers for CPUs do not vectorise by themselves: sums, maxima, calls of
   sqrt or log. It is the same on every device, as the order of sums and the functions' last bits depend on it.
   The last load of a run is padded with `filler`. */

/* The larger of two floats, or of vectors lane by lane; `a` where `b` is NaN, so that a maximum ignores NaN. */
#define LARGER(a, b) ((b) > (a) ? (b) : (a))

/* a * b + c in a GPU's sums, rounded once wherever that is fast: left to a compiler, it may depend on the size of a
   work-group, as with Intel's for CPUs, which has that instruction and does not say so. */
#if defined(FP_FAST_FMAF) || defined(cl_intel_vec_len_hint)
#define MULTIPLY_ADD(a, b, c) fma(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

#ifdef ON_CPU

/* Intel's compiler would also make kernels that run several work-items as the lanes of a vector. Here a group is one
   item, which would never run them, and they take three quarters of the time to build. */
#ifdef cl_intel_vec_len_hint
#define __kernel __kernel __attribute__((intel_vec_len_hint(1)))
#endif

inline int run_length(int count) {
    const int items = (int)get_global_size(0);
    return (count + items - 1) / items;
}

inline int run_first(int count) { return min((int)get_global_id(0) * run_length(count), count); }
inline int run_last(int count) { return min((int)get_global_id(0) * run_length(count) + run_length(count), count); }

#define FOR_EACH(i, count) for (int i = run_first(count), i##_last = run_last(count); i < i##_last; ++i)
/* For loops over single elements, which compilers vectorise by themselves: in vectors of LOOP_LANES. */
#if LOOP_LANES == 16
#define FOR_ELEMENTS(i, count) _Pragma("clang loop vectorize_width(16)") FOR_EACH(i, count)
#else
#define FOR_ELEMENTS(i, count) FOR_EACH(i, count)
#endif
#define FOR_ROWS(row, rows) FOR_EACH(row, rows)
#define FOR_COLUMNS(column, columns) for (int column = 0; column < (columns); ++column)

#define LANES 8
typedef float8 lanes;
typedef int8 whole_lanes;
#define AS_WHOLE as_int8
#define AS_LANES as_float8

/* PoCL does not inline vload8, vstore8, min, max and fmax, and each call spills all vector registers. */
typedef float8 __attribute__((aligned(4))) unaligned8;
#define load8(from) (*(__global const unaligned8 *)(from))
#define store8(value, to) (*(__global unaligned8 *)(to) = (value))

inline lanes load_lanes(__global const float *from, int left, float filler) {
    if (left >= LANES) return load8(from);
    lanes value = filler;
    for (int i = 0; i < left; ++i) ((float *)&value)[i] = from[i];
    return value;
}

inline void store_lanes(lanes value, __global float *to, int left) {
    if (left >= LANES) {
        store8(value, to);
    } else {
        for (int i = 0; i < left; ++i) to[i] = ((float *)&value)[i];
    }
}

inline float lanes_sum(lanes value) {
    const float4 half_sum = value.lo + value.hi;
    return (half_sum.x + half_sum.z) + (half_sum.y + half_sum.w);
}

/* The sum of `count` numbers, in an order that depends on `count` alone. */
inline float sum_run(__global const float *x, int count) {
    float8 s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
    int i = 0;
    for (; i + 32 <= count; i += 32) {
        s0 += load8(x + i);
        s1 += load8(x + i + 8);
        s2 += load8(x + i + 16);
        s3 += load8(x + i + 24);
    }
    for (; i + 8 <= count; i += 8) s0 += load8(x + i);
    s0 = (s0 + s1) + (s2 + s3);
    const float4 quarter = s0.lo + s0.hi;
    float total = (quarter.x + quarter.z) + (quarter.y + quarter.w);
    for (; i < count; ++i) total += x[i];
    return total;
}

inline float lanes_max(lanes value) {
    const float4 half_max = LARGER(value.lo, value.hi);
    const float2 quarter_max = LARGER(half_max.lo, half_max.hi);
    return LARGER(quarter_max.x, quarter_max.y);
}

#define FOR_LANES(i, count)                                                        \
    for (int i = LANES * run_first(((count) + LANES - 1) / LANES),                 \
             i##_last = min(LANES * run_last(((count) + LANES - 1) / LANES), count); \
         i < i##_last; i += LANES)
#define FOR_COLUMN_LANES(column, columns) for (int column = 0; column < (columns); column += LANES)
#define GROUP_SCRATCH(name) __local float *const name = 0
#define GROUP_SUM(value, name) (value)
#define GROUP_MAX(value, name) (value)
#define GROUP_LEADER 1

#else

/* Sums and maxima over a work-group combine item i with item i + half, for half = ROW_GROUP / 2, ... 2, 1: a tree that
   depends on ROW_GROUP alone. With SUB_GROUPS the last levels, which fit into a sub-group, exchange registers instead of
   local memory and need no barrier: the items i and i ^ half are the same pairs, in the same order, so that every bit is
   the same. Each sub-group does so for the first items, so that all items have the result. SUB_GROUPS is 1 for
   cl_khr_subgroup_shuffle and 2 for cl_intel_subgroups. */
#ifdef SUB_GROUPS
#if SUB_GROUPS == 1
#define EXCHANGED(value, half) sub_group_shuffle_xor(value, (uint)(half))
#else
#define EXCHANGED(value, half) intel_sub_group_shuffle_xor(value, (uint)(half))
#endif
/* 1, for a tree in local memory alone, where sub-groups do not divide the group into equal parts. */
#define SUB_GROUP_SIZE \
    ((get_max_sub_group_size() & (get_max_sub_group_size() - 1)) == 0 ? min((int)get_max_sub_group_size(), ROW_GROUP) : 1)
#define PLACE(size) ((size) == 1 ? 0 : (int)get_sub_group_local_id())
#else
#define EXCHANGED(value, half) (value)
#define SUB_GROUP_SIZE 1
#define PLACE(size) 0
#endif

#define GROUP_TREE(NAME, COMBINED)                                                                     \
    inline float NAME(float value, __local float *scratch) {                                           \
        const int item = get_local_id(0), size = SUB_GROUP_SIZE, place = PLACE(size);                  \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                  \
        scratch[item] = value;                                                                         \
        for (int half_size = ROW_GROUP / 2; half_size >= size; half_size /= 2) {                       \
            barrier(CLK_LOCAL_MEM_FENCE);                                                              \
            if (item < half_size) scratch[item] = COMBINED(scratch[item], scratch[item + half_size]);  \
        }                                                                                              \
        barrier(CLK_LOCAL_MEM_FENCE);                                                                  \
        value = scratch[place];                                                                        \
        for (int half_size = size / 2; half_size > 0; half_size /= 2) {                                \
            const float other = EXCHANGED(value, half_size);                                           \
            value = place & half_size ? COMBINED(other, value) : COMBINED(value, other);               \
        }                                                                                              \
        return value;                                                                                  \
    }
#define ADDED(a, b) ((a) + (b))
GROUP_TREE(group_sum, ADDED)
GROUP_TREE(group_max, LARGER)

typedef float lanes;
typedef int whole_lanes;
#define AS_WHOLE as_int
#define AS_LANES as_float
#define LANES 1
#define load_lanes(from, left, filler) (*(from))
#define store_lanes(value, to, left) (*(to) = (value))
#define lanes_sum(value) (value)
#define lanes_max(value) (value)
#define FOR_LANES FOR_EACH
#define FOR_COLUMN_LANES FOR_COLUMNS

#define FOR_EACH(i, count) for (int i = get_global_id(0); i < (count); i += (int)get_global_size(0))
#define FOR_ELEMENTS FOR_EACH
#define FOR_ROWS(row, rows) for (int row = get_group_id(0); row < (rows); row += (int)get_num_groups(0))
#define FOR_COLUMNS(column, columns) for (int column = get_local_id(0); column < (columns); column += ROW_GROUP)
#define GROUP_SCRATCH(name) __local float name[ROW_GROUP]
#define GROUP_SUM(value, name) group_sum(value, name)
#define GROUP_MAX(value, name) group_max(value, name)
#define GROUP_LEADER (get_local_id(0) == 0)

#endif

/* Numbers of 16 bits, as integers: many devices have no half arithmetic. Rounding is to nearest, ties to even. */

#define INFINITE 0x7f800000u
#define IS_FINITE(value) ((as_uint(value) & INFINITE) != INFINITE)

/* Exponents: a half's bias is 112 less than a float's. Below 2^-14 halves are multiples of 2^-24, the distance
   of floats between 0.5 and 1, so that adding 0.5 rounds to them. */
#define REBIAS (112u << 23)
#define HALF_OVERFLOW 0x477ff000u
#define HALF_NORMAL 0x38800000u

inline uint half_of(float value) {
    const uint bits = as_uint(value), magnitude = bits & 0x7fffffffu;
    const uint normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - REBIAS) >> 13;
    const uint small = as_uint(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint large = magnitude > INFINITE ? 0x7e00u : 0x7c00u;
    const uint rounded = magnitude < HALF_NORMAL ? small : magnitude < HALF_OVERFLOW ? normal : large;
    return rounded | ((bits >> 16) & 0x8000u);
}

inline float float_of(uint half_bits) {
    const uint magnitude = half_bits & 0x7fffu, sign = (half_bits & 0x8000u) << 16;
    const uint normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 2 * REBIAS : REBIAS);
    const uint small = as_uint(as_float(0x3f000000u | magnitude) - 0.5f);
    return as_float((magnitude < 0x400u ? small : normal) | sign);
}

inline uint bfloat16_of(float value) {
    const uint bits = as_uint(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return ((bits & 0x7fffffffu) > INFINITE ? bits | 0x400000u : rounded) >> 16;
}

inline float float_of_bfloat16(uint bits) { return as_float(bits << 16); }

/* For helpers whose loops must unroll into registers: their bounds are constants after inlining. */
#define INLINE static inline __attribute__((always_inline))
INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE int larger(int a, int b) { return a > b ? a : b; }

/* A long sum is one of runs of about LONG_RUN terms, each added with what rounding took from those before; infinity and
   NaN lose nothing. Source: Kahan, "Further remarks on reducing truncation errors", 1965. */
#define LONG_RUN 64
INLINE bool is_long(int *terms, int more) {
    *terms += more;
    if (*terms < LONG_RUN) return false;
    *terms = 0;
    return true;
}

INLINE void end_run(lanes *run, lanes *sum, lanes *excess) {
    const lanes added = *run - *excess, all = *sum + added, none = 0.0f;
    *excess = all - all == none ? (all - *sum) - added : none;
    *sum = all;
    *run = none;
}

/* Notes the first index that is not one of `count`: see clcomm/engine/tensor_methods.py. */
INLINE void note_outside(__global int *outside, int index, int count) {
    if (atomic_add(outside, 1) == 0) {
        outside[1] = index;
        outside[2] = count;
    }
}
#define UNROLL _Pragma("unroll")

/* Helpers that take or return wide vectors are always inlined, so it does not matter how a processor without such
   registers would pass them. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpsabi"
#endif

#if defined(ON_CPU) && defined(TILE_LANES)

/* A vector of sums in the registers of a product's tile. */
#if TILE_LANES == 16
typedef float16 vector;
typedef int16 vector_mask;
#else
typedef float8 vector;
typedef int8 vector_mask;
#endif
typedef vector __attribute__((aligned(4))) unaligned_vector;

INLINE vector load_vector(__global const float *from, int left)
{
    if (left >= TILE_LANES) return *(__global const unaligned_vector *)from;
    vector value = 0.0f;
    for (int i = 0; i < left; ++i) ((float *)&value)[i] = from[i];
    return value;
}

INLINE void store_vector(vector value, __global float *to, int left)
{
    if (left >= TILE_LANES) *(__global unaligned_vector *)to = value;
    else for (int i = 0; i < left; ++i) to[i] = ((float *)&value)[i];
}

#endif

/* For kernels of 16 lanes: LLVM cuts some of their vectors in two unless a function asks for 512 bits. */
#if defined(__has_attribute)
#if __has_attribute(min_vector_width)
#define WIDE_VECTORS __attribute__((min_vector_width(512)))
#endif
#endif
#ifndef WIDE_VECTORS
#define WIDE_VECTORS
#endif
#if LOOP_LANES == 16
#define __kernel __kernel WIDE_VECTORS
#endif

/* Transposes 8 x 8 floats in three rounds of pairwise shuffles. */
INLINE void transpose8(float8 r[8]) {
    float8 s[8], t[8];
    UNROLL for (int i = 0; i < 4; ++i) {
        s[i] = (float8)(r[i].lo, r[i + 4].lo);
        s[i + 4] = (float8)(r[i].hi, r[i + 4].hi);
    }
    UNROLL for (int i = 0; i < 4; ++i) {
        const float8 a = s[i + (i & 2)], b = s[i + (i & 2) + 2];
        t[i + (i & 2)] = (float8)(a.s01, b.s01, a.s45, b.s45);
        t[i + (i & 2) + 2] = (float8)(a.s23, b.s23, a.s67, b.s67);
    }
    UNROLL for (int i = 0; i < 8; i += 2) {
        const float8 a = t[i], b = t[i + 1];
        r[i] = (float8)(a.s0, b.s0, a.s2, b.s2, a.s4, b.s4, a.s6, b.s6);
        r[i + 1] = (float8)(a.s1, b.s1, a.s3, b.s3, a.s5, b.s5, a.s7, b.s7);
    }
}

/* |x|: fabs is a call, too. */
INLINE lanes size_of(lanes x) { return AS_LANES(AS_WHOLE(x) & 0x7fffffff); }

/* e^x, less than 1 ulp off, 0 below -86.9, where it is less than 2e-38. Drivers' exp, a call that spills all vector
   registers, takes three times as long, and each driver's has other last bits. x = n log(2) + rest, with log(2) in two
   parts; a polynomial of the rest, in products that do not wait for each other; then the exponent's bits, of n - 1, as
   2^128 has none. */
INLINE lanes exponential(lanes x) {
    const lanes shifted = x * 1.44269504f + 12582912.0f; /* its lowest bits are the nearest whole number, n */
    const lanes n = shifted - 12582912.0f;
    const lanes rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const lanes square = rest * rest;
    const lanes high = (0.0013814433477818966f * square) + (0.008368796668946743f * rest + 0.041668396443128586f);
    const lanes low = 0.1666651964187622f * rest + 0.4999999403953552f;
    const lanes sum = ((high * square + low) * square + rest) + 1.0f;
    const lanes half_power = AS_LANES((AS_WHOLE(shifted) << 23) + (whole_lanes)0x3f000000);
    const lanes power = (sum + sum) * half_power, none = 0.0f, all = INFINITY;
    return x < -86.9f ? none : x > 88.7228f ? all : power;
}

/* log(1 + x) for x from 0 to 1: 2 atanh(s) with s = x / (2 + x), a polynomial of s^2 times s, 4e-9 off; NaN passes. */
INLINE lanes log_of_1_plus(lanes x) {
    const lanes s = x / (2.0f + x), square = s * s, fourth = square * square;
    const lanes from_2 = (0.28178325295448303f * square + 0.27960604429244995f) * square + 0.40024909377098083f;
    return (from_2 * fourth + (0.6666631698608398f * square + 2.0f)) * s;
}

/* 2^x for x up to 126, 0 below -125: a polynomial for the part of x that is not a whole number, 4e-8 off, and the
   exponent's bits for the rest. e^x is 2^(LOG2E x). */
#define LOG2E 1.44269504088896340736f
#define DEFINE_POWER_OF_2(NAME, REAL, WHOLE, AS_WHOLE, AS_REAL)                                  \
    INLINE REAL NAME(REAL x)                                                                     \
    {                                                                                            \
        const REAL shifted = x + 12582912.0f; /* its lowest bits are the nearest whole number */ \
        const REAL rest = x - (shifted - 12582912.0f);                                           \
        REAL sum = 0.00015461447755119374f;                                                      \
        sum = sum * rest + 0.0013390866806730628f;                                               \
        sum = sum * rest + 0.009618056938052177f;                                                \
        sum = sum * rest + 0.055503569543361664f;                                                \
        sum = sum * rest + 0.24022650718688965f;                                                 \
        sum = sum * rest + 0.6931471824645996f;                                                  \
        sum = sum * rest + 1.0f;                                                                 \
        const REAL power = AS_REAL((AS_WHOLE(shifted) << 23) + (WHOLE)0x3f800000);               \
        return x < -125.0f ? (REAL)0.0f : sum * power;                                           \
    }
