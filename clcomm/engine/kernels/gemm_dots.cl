/* Matrix products C[M,N] = A[M,K] B[N,K]^T (+ bias[N], then ReLU) for CPUs, where B has so few rows that a panel of
   gemm.cl would be half empty: the lanes run along K. They are kept for some rows of C, and then summed for eight
   elements at a time. K is at least 8, N at most MOST_DOTS. */

#define DOT_ROWS 2
#define DOT_COLUMNS 5
#define DOT_RUN 16 /* rows of C whose lanes are kept */

/* The sums of the lanes of each of eight vectors, in the order of lanes_sum. */
INLINE float8 lanes_sums(const float8 *r)
{
    float8 s[4], t[2];
    UNROLL for (int i = 0; i < 4; ++i) s[i] = (float8)(r[i].lo, r[i + 4].lo) + (float8)(r[i].hi, r[i + 4].hi);
    UNROLL for (int i = 0; i < 2; ++i) {
        const float8 even = s[2 * i], odd = s[2 * i + 1];
        t[i] = (float8)(even.s01, odd.s01, even.s45, odd.s45) + (float8)(even.s23, odd.s23, even.s67, odd.s67);
    }
    return (float8)(t[0].s02, t[1].s02, t[0].s46, t[1].s46) + (float8)(t[0].s13, t[1].s13, t[0].s57, t[1].s57);
}

/* The lanes of `rows` rows of C by DOT_COLUMNS columns go to to[row * to_row + column]; columns after
   the last of the `left` ones repeat it. */
INLINE void dots(
    __global const float *a, __global const float *b, __global const float *bias, float8 *to, int to_row, int depth,
    int left, const int rows)
{
    const float8 zero = 0.0f;
    float8 sum[DOT_ROWS][DOT_COLUMNS];
    int place[DOT_COLUMNS];
    UNROLL for (int j = 0; j < DOT_COLUMNS; ++j) {
        const int column = smaller(j, left - 1);
        const float8 start = HAS_BIAS ? (float8)(bias[column], 0, 0, 0, 0, 0, 0, 0) : zero;
        place[j] = column * depth;
        UNROLL for (int r = 0; r < DOT_ROWS; ++r) sum[r][j] = start;
    }
#define ADD_DOTS(k, keep) \
    { \
        float8 of_a[DOT_ROWS]; \
        UNROLL for (int r = 0; r < DOT_ROWS; ++r) if (r < rows) of_a[r] = keep(load8(a + r * depth + (k))); \
        UNROLL for (int j = 0; j < DOT_COLUMNS; ++j) { \
            const float8 of_b = keep(load8(b + place[j] + (k))); \
            UNROLL for (int r = 0; r < DOT_ROWS; ++r) if (r < rows) sum[r][j] += of_a[r] * of_b; \
        } \
    }
#define ALL_LANES(value) (value)
#define NEW_LANES(value) (is_new ? (value) : zero)
    int k = 0;
    for (; k + 16 <= depth; k += 16) {
        ADD_DOTS(k, ALL_LANES)
        ADD_DOTS(k + 8, ALL_LANES)
    }
    for (; k + 8 <= depth; k += 8) ADD_DOTS(k, ALL_LANES)
    if (k < depth) { /* the last eight, without those added before */
        const int8 is_new = (int8)(0, 1, 2, 3, 4, 5, 6, 7) >= 8 - (depth - k);
        ADD_DOTS(depth - 8, NEW_LANES)
    }
    UNROLL for (int r = 0; r < DOT_ROWS; ++r) if (r < rows)
        UNROLL for (int j = 0; j < DOT_COLUMNS; ++j) to[r * to_row + j] = sum[r][j];
}

__kernel void gemm_dots(
    __global const float *a, __global const float *b, __global float *c, __global const float *bias,
    int rows, int columns, int depth)
{
    float8 lanes[DOT_RUN * MOST_DOTS + DOT_COLUMNS];
    const int last = run_last(rows);
    for (int first = run_first(rows); first < last; first += DOT_RUN) {
        const int run = smaller(DOT_RUN, last - first);
        /* From the last columns to the first: surplus columns of a row are overwritten by the next one. */
        for (int n = (columns - 1) / DOT_COLUMNS * DOT_COLUMNS; n >= 0; n -= DOT_COLUMNS) {
            int m = 0;
#define DOTS(rows) \
    dots(a + (long)(first + m) * depth, b + n * depth, bias + n, lanes + m * columns + n, columns, depth, \
         columns - n, rows)
            for (; m + DOT_ROWS <= run; m += DOT_ROWS) DOTS(DOT_ROWS);
            if (m < run) DOTS(1);
        }
        for (int i = 0; i < run * columns; i += 8) {
            float8 value = lanes_sums(lanes + i);
            if (HAS_RELU) value = value <= 0.0f ? (float8)0.0f : value;
            store_lanes(value, c + (long)first * columns + i, run * columns - i);
        }
    }
}
