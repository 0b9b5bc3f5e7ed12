/* Matrix products C[M,N] = A[M,K] B[K,N] (+ bias[N], then ReLU) for GPUs; `transposed` as in gemm.cl.

   A work-group of SIDE x SIDE items computes a block of BLOCK x BLOCK, an item EACH x EACH sums of it in registers. Both
   operands pass through local memory in slices of SLICE rows of K. There are two slices of each: while items read one,
   the elements of the next are on their way from global memory to registers, from where they go to the other one, so
   that one barrier a slice suffices.

   All memory is accessed four floats at a time. In global memory neighbouring items read neighbouring addresses,
   whichever way an operand lies. In local memory both operands lie along the block, so that an item reads its rows and
   columns as float4; an item's are EACH / 4 runs of four, SIDE * 4 apart, so that neighbouring items read neighbouring
   float4, which lie in different banks. Rows are padded by a float4, for an operand that is transposed on the way: items
   write its elements one by one, and without padding all to one bank.

   Each sum starts from zero, and takes its terms in the order of K, in one accumulator: no size, block or grid changes
   a bit of it. */

/* As in gemm.cl. */
#ifdef BATCHED
#define OF_A_BATCH , __global const int *firsts
#define BEGIN_PRODUCT \
    a += firsts[2 * get_group_id(2)]; \
    b += firsts[2 * get_group_id(2) + 1]; \
    c += get_group_id(2) * rows * columns;
#else
#define OF_A_BATCH
#define BEGIN_PRODUCT
#endif

#define A_TRANSPOSED 1
#define B_TRANSPOSED 2
#define BLOCK (SIDE * EACH)
#define ITEMS (SIDE * SIDE)
#define PITCH (BLOCK / 4 + 1) /* of a slice's rows, in float4 */
#define RUNS (EACH / 4)
#define LOADS (BLOCK * SLICE / 4 / ITEMS) /* float4 of an operand's slice that an item brings */
#if EACH % 4 || SLICE % 4 || BLOCK * SLICE / 4 % ITEMS
#error "every item brings whole float4"
#endif

/* An operand as an array of `count` lines (rows of A, columns of B) of `depth` terms. Either the terms of a line are
   neighbours in memory or the lines are; `pitch` is the distance in the other direction. `is_aligned`: every float4 that
   begins at a multiple of four lies at a multiple of 16 bytes. */
typedef struct {
    __global const float *values;
    int count, depth, pitch, terms_are_neighbours, is_aligned;
} Operand;

/* Where in a slice the float4 number `load` of an item belongs: its first line and its first term. */
INLINE int2 place_of(Operand operand, int item, int load)
{
    const int i = item + load * ITEMS;
    return operand.terms_are_neighbours ? (int2)(i / (SLICE / 4), i % (SLICE / 4) * 4)
                                        : (int2)(i % (BLOCK / 4) * 4, i / (BLOCK / 4));
}

/* Reads a float4 of the block that begins at line `first` and term `k`; elements outside the matrix are zero. */
INLINE float4 fetch(Operand operand, int2 place, int first, int k)
{
    const int line = first + place.x, term = k + place.y, along = operand.terms_are_neighbours;
    const int left = line >= operand.count || term >= operand.depth ? 0
        : along ? operand.depth - term : operand.count - line;
    float4 value = 0.0f;
    if (left <= 0) return value;
    __global const float *from = operand.values
        + (along ? (long)line * operand.pitch + term : (long)term * operand.pitch + line);
    if (left >= 4) return operand.is_aligned ? *(__global const float4 *)from : vload4(0, from);
    value.x = from[0];
    if (left > 1) value.y = from[1];
    if (left > 2) value.z = from[2];
    return value;
}

INLINE void keep(__local float4 *slice, Operand operand, int2 place, float4 value)
{
    if (operand.terms_are_neighbours) {
        __local float *to = (__local float *)(slice + place.y * PITCH) + place.x;
        to[0] = value.x;
        to[4 * PITCH] = value.y;
        to[8 * PITCH] = value.z;
        to[12 * PITCH] = value.w;
    } else {
        slice[place.y * PITCH + place.x / 4] = value;
    }
}

/* Adds one term to each of an item's sums. */
INLINE void add_terms(float4 sum[EACH][RUNS], __local const float4 *left, __local const float4 *right)
{
    float4 row[RUNS], column[RUNS];
    UNROLL for (int run = 0; run < RUNS; ++run) row[run] = left[run * SIDE], column[run] = right[run * SIDE];
    UNROLL for (int i = 0; i < RUNS; ++i)
        UNROLL for (int j = 0; j < RUNS; ++j) {
            sum[4 * i][j] = MULTIPLY_ADD((float4)(row[i].x), column[j], sum[4 * i][j]);
            sum[4 * i + 1][j] = MULTIPLY_ADD((float4)(row[i].y), column[j], sum[4 * i + 1][j]);
            sum[4 * i + 2][j] = MULTIPLY_ADD((float4)(row[i].z), column[j], sum[4 * i + 2][j]);
            sum[4 * i + 3][j] = MULTIPLY_ADD((float4)(row[i].w), column[j], sum[4 * i + 3][j]);
        }
}

/* Stores the first `left` of four neighbours of C. */
INLINE void store(float4 value, __global float *to, int left, int is_aligned)
{
    if (left >= 4 && is_aligned) {
        *(__global float4 *)to = value;
        return;
    }
    if (left > 0) to[0] = value.x;
    if (left > 1) to[1] = value.y;
    if (left > 2) to[2] = value.z;
    if (left > 3) to[3] = value.w;
}

__kernel __attribute__((reqd_work_group_size(SIDE, SIDE, 1))) void gemm(
    __global const float *a, __global const float *b, __global float *c, __global const float *bias,
    int rows, int columns, int depth, int transposed OF_A_BATCH)
{
    BEGIN_PRODUCT
    __local float4 left[2][SLICE * PITCH], right[2][SLICE * PITCH];
    const int a_pitch = transposed & A_TRANSPOSED ? rows : depth, b_pitch = transposed & B_TRANSPOSED ? depth : columns;
    const Operand lefts = {a, rows, depth, a_pitch, !(transposed & A_TRANSPOSED), a_pitch % 4 == 0};
    const Operand rights = {b, columns, depth, b_pitch, (transposed & B_TRANSPOSED) != 0, b_pitch % 4 == 0};
    const int x = get_local_id(0), y = get_local_id(1), item = y * SIDE + x;
    const int n = get_group_id(0) * BLOCK, m = get_group_id(1) * BLOCK;
    float4 sum[EACH][RUNS], next_left[LOADS], next_right[LOADS];
    UNROLL for (int i = 0; i < EACH; ++i) UNROLL for (int j = 0; j < RUNS; ++j) sum[i][j] = 0.0f;
#define FETCH(k)                                                               \
    UNROLL for (int load = 0; load < LOADS; ++load) {                          \
        next_left[load] = fetch(lefts, place_of(lefts, item, load), m, k);     \
        next_right[load] = fetch(rights, place_of(rights, item, load), n, k);  \
    }
#define KEEP(side)                                                             \
    UNROLL for (int load = 0; load < LOADS; ++load) {                          \
        keep(left[side], lefts, place_of(lefts, item, load), next_left[load]); \
        keep(right[side], rights, place_of(rights, item, load), next_right[load]); \
    }
    FETCH(0);
    KEEP(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    int side = 0;
    for (int k = 0; k < depth; k += SLICE, side = 1 - side) {
        const int is_last = k + SLICE >= depth;
        if (!is_last) {
            FETCH(k + SLICE);
        }
        __local const float4 *from_left = left[side] + y, *from_right = right[side] + x;
        if (k + SLICE <= depth) {
            UNROLL for (int z = 0; z < SLICE; ++z) add_terms(sum, from_left + z * PITCH, from_right + z * PITCH);
        } else {
            for (int z = 0; z < depth - k; ++z) add_terms(sum, from_left + z * PITCH, from_right + z * PITCH);
        }
        if (!is_last) {
            KEEP(1 - side);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    UNROLL for (int j = 0; j < RUNS; ++j) {
        const int column = n + 4 * (x + j * SIDE), here = columns - column;
        float4 added = 0.0f;
        if (HAS_BIAS) {
            if (here > 0) added.x = bias[column];
            if (here > 1) added.y = bias[column + 1];
            if (here > 2) added.z = bias[column + 2];
            if (here > 3) added.w = bias[column + 3];
        }
        UNROLL for (int i = 0; i < EACH; ++i) {
            const int row = m + 4 * (y + i / 4 * SIDE) + i % 4;
            float4 value = HAS_BIAS ? sum[i][j] + added : sum[i][j];
            if (HAS_RELU) value = value <= 0.0f ? (float4)0.0f : value;
            if (row < rows) store(value, c + (long)row * columns + column, here, columns % 4 == 0);
        }
    }
}
