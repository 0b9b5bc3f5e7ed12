/* Matrix products C[M,N] = A[M,K] B[K,N] (+ bias[N], then ReLU). `transposed` says which operands are stored as A^T
   or B^T, so the same kernels do NN, NT and TN. Sums over K run in one fixed order for each element of C,
   whatever the grid, so results do not depend on the number of cores. */

#define A_TRANSPOSED 1
#define B_TRANSPOSED 2
/* With BATCHED each product of a batch is in a third dimension of the grid; its factors begin at `firsts`. */
#ifdef BATCHED
#define OF_A_BATCH , __global const int *firsts
#define BEGIN_PRODUCT \
    a += firsts[2 * get_global_id(2)]; \
    b += firsts[2 * get_global_id(2) + 1]; \
    c += get_global_id(2) * rows * columns;
#else
#define OF_A_BATCH
#define BEGIN_PRODUCT
#endif

#define STRIDES \
    const int a_row = transposed & A_TRANSPOSED ? 1 : depth, a_column = transposed & A_TRANSPOSED ? rows : 1, \
              b_row = transposed & B_TRANSPOSED ? 1 : columns, b_column = transposed & B_TRANSPOSED ? depth : 1

/* A work-item takes a run of rows of A, and of panels of PANEL columns of B. It copies DEPTH rows of a panel into the
   order in which they are read, so that they stay in the cache, and processes the rows of A in tiles of
   TILE_ROWS x PANEL sums, in vectors of TILE_LANES: 6 x 16 are 12 vectors of 8 lanes, the most that 16 registers hold
   with their operands, and 12 x 32 are 24 vectors of 16 lanes for 32 registers. Each sum has a lane of its own, so that
   no size changes a bit. The panel is in private memory, since PoCL allocates local memory at each launch. */

#define SHORT_ROWS (TILE_ROWS < 4 ? TILE_ROWS : 4)
#define SIDES (PANEL / TILE_LANES)

/* Columns after the last one repeat it or are zero: their sums are never stored, but old values, which may be denormal
   numbers, would take a hundred times as long. */
INLINE void pack_panel(
    vector *panel, __global const float *b, long b_row, long b_column, int depth, int columns)
{
    if (b_column == 1) {
        for (int k = 0; k < depth; ++k)
            UNROLL for (int side = 0; side < SIDES; ++side)
                panel[SIDES * k + side] = load_vector(b + k * b_row + TILE_LANES * side, columns - TILE_LANES * side);
        return;
    }
    float *flat = (float *)panel;
    int k = 0;
    if (columns < PANEL)
        for (int i = 0; i < SIDES * depth; ++i) panel[i] = 0.0f;
    for (; k + 8 <= depth; k += 8)
        for (int j = 0; j < columns; j += 8) {
            float8 block[8];
            UNROLL for (int i = 0; i < 8; ++i) block[i] = load8(b + k + smaller(j + i, columns - 1) * b_column);
            transpose8(block);
            UNROLL for (int i = 0; i < 8; ++i) *(float8 *)(flat + (k + i) * PANEL + j) = block[i];
        }
    for (; k < depth; ++k)
        for (int j = 0; j < columns; ++j) flat[k * PANEL + j] = b[k + j * b_column];
}

/* Sums a tile of `rows` rows by `sides` vectors; rows after `valid` read the last one and are not stored. B is read
   from the panel; with `fills_panel` it is read from B itself and copied to the panel. With `has_mask` sums are zero
   where the mask, of C's shape, is not positive: ReLU's gradient from its result. */
INLINE void tile(
    __global const float *a, long a_row, long a_column, __global const float *b, long b_row, vector *panel,
    __global float *c, int c_row, __global const float *bias, __global const float *mask, int has_mask, int depth,
    int columns, int valid, int is_first, int is_last, const int rows, const int sides, const int fills_panel)
{
    vector sum[TILE_ROWS][SIDES];
    long row[TILE_ROWS];
    UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < rows) {
        UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] = 0.0f;
        row[r] = smaller(r, valid - 1) * a_row;
    }
    for (int k = 0; k < depth; ++k) {
        vector right[SIDES];
        UNROLL for (int side = 0; side < SIDES; ++side) if (side < sides) {
            right[side] = fills_panel ? load_vector(b + TILE_LANES * side, TILE_LANES) : panel[SIDES * k + side];
            if (fills_panel) panel[SIDES * k + side] = right[side];
        }
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < rows) {
            const float value = a[row[r]];
            UNROLL for (int side = 0; side < SIDES; ++side) if (side < sides) sum[r][side] += value * right[side];
        }
        a += a_column;
        b += b_row;
    }
    const vector zero = 0.0f;
    UNROLL for (int side = 0; side < SIDES; ++side) if (side < sides) {
        const int count = columns - TILE_LANES * side;
        const vector start = HAS_BIAS && is_first ? load_vector(bias + TILE_LANES * side, count) : zero;
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < rows && r < valid) {
            const int place = r * c_row + TILE_LANES * side;
            __global float *to = c + place;
            vector value = sum[r][side];
            if (HAS_BIAS || !is_first) value += is_first ? start : load_vector(to, count);
            if (HAS_RELU && is_last) value = value <= zero ? zero : value;
            if (has_mask) value = load_vector(mask + place, count) <= zero ? zero : value;
            store_vector(value, to, count);
        }
    }
}

/* The end of the full tiles: 8 remaining rows are two short tiles, not a full one and a quarter. */
INLINE int full_tiles_end(int first, int last)
{
    return last - SHORT_ROWS * 2 * ((last - first) % TILE_ROWS == SHORT_ROWS * 2 % TILE_ROWS);
}

__kernel void gemm(
    __global const float *a, __global const float *b, __global float *c, __global const float *bias,
    int rows, int columns, int depth, int transposed OF_A_BATCH)
{
    BEGIN_PRODUCT
    vector panel[SIDES * DEPTH];
    STRIDES;
    const int tiles = TILE_ROWS * (int)get_global_size(1), rows_each = (rows + tiles - 1) / tiles * TILE_ROWS;
    const int first = get_global_id(1) * rows_each, last = smaller(first + rows_each, rows);
    const int panels = PANEL * (int)get_global_size(0), columns_each = (columns + panels - 1) / panels * PANEL;
    const int left_column = get_global_id(0) * columns_each, right_column = smaller(left_column + columns_each, columns);
    for (int k = 0; k < depth; k += DEPTH)
        for (int n = left_column; n < right_column; n += PANEL) {
            const int run = smaller(DEPTH, depth - k), width = smaller(PANEL, columns - n);
            pack_panel(panel, b + (long)k * b_row + (long)n * b_column, b_row, b_column, run, width);
            __global const float *left = a + (long)k * a_column;
#define TILE(columns_, valid, rows_, sides) \
    tile(left + (long)m * a_row, a_row, a_column, b, 0, panel, c + (long)m * columns + n, columns, bias + n, 0, 0, \
         run, columns_, valid, k == 0, k + run == depth, rows_, sides, 0)
            int m = first;
            if (width == PANEL) /* columns are not checked */
                for (const int end = full_tiles_end(first, last); m + TILE_ROWS <= end; m += TILE_ROWS)
                    TILE(PANEL, TILE_ROWS, TILE_ROWS, SIDES);
            else if (width <= TILE_LANES)
                for (; m < last; m += TILE_ROWS) TILE(width, smaller(TILE_ROWS, last - m), TILE_ROWS, 1);
            for (; m < last; m += SHORT_ROWS) TILE(width, smaller(SHORT_ROWS, last - m), SHORT_ROWS, SIDES);
        }
}

#define BLOCK 16 /* floats of a cache line */

/* Transposes BLOCK x BLOCK floats. Whole lines are read and written at once: where rows are a power of two apart, their
   lines share a set of the cache, which holds fewer than BLOCK of them. */
INLINE void transpose_block(__global const float *from, __global float *to, long from_row, long to_row)
{
    float8 turned[BLOCK][BLOCK / 8];
    UNROLL for (int row = 0; row < BLOCK; row += 8) {
        float8 left[8], right[8];
        UNROLL for (int i = 0; i < 8; ++i) {
            left[i] = load8(from + (row + i) * from_row);
            right[i] = load8(from + (row + i) * from_row + 8);
        }
        transpose8(left);
        transpose8(right);
        UNROLL for (int i = 0; i < 8; ++i) {
            turned[i][row / 8] = left[i];
            turned[i + 8][row / 8] = right[i];
        }
    }
    UNROLL for (int i = 0; i < BLOCK; ++i) {
        store8(turned[i][0], to + i * to_row);
        store8(turned[i][1], to + i * to_row + 8);
    }
}

#define TURNED_ROWS 64 /* of a work-item: so many floats of a page are written in a row */

/* to[columns][rows] = from[rows][columns], of several matrices. A work-item takes TURNED_ROWS rows. */
__kernel void transpose(__global const float *from, __global float *to, int rows, int columns)
{
    from += get_global_id(1) * rows * columns;
    to += get_global_id(1) * rows * columns;
    const int first = get_global_id(0) * TURNED_ROWS, last = smaller(first + TURNED_ROWS, rows);
    const int whole_rows = first + (last - first) / BLOCK * BLOCK, whole_columns = columns / BLOCK * BLOCK;
    for (int column = 0; column < whole_columns; column += BLOCK)
        for (int row = first; row < whole_rows; row += BLOCK)
            transpose_block(from + (long)row * columns + column, to + (long)column * rows + row, columns, rows);
    for (int column = 0; column < columns; ++column)
        for (int row = column < whole_columns ? whole_rows : first; row < last; ++row)
            to[(long)column * rows + row] = from[(long)row * columns + column];
}

/* Sums up to 8 * `eights` columns of a matrix, from column `n` on, top to bottom, in
   runs. */
INLINE void sum_strip(__global const float *matrix, __global float *sums, int rows, int columns, int n, const int eights)
{
    float8 sum[8], run[8], excess[8];
    const int width = columns - n;
    UNROLL for (int i = 0; i < eights; ++i) sum[i] = excess[i] = run[i] = 0.0f;
    for (int first = 0; first < rows; first += LONG_RUN) {
        for (int row = first; row < smaller(first + LONG_RUN, rows); ++row)
            UNROLL for (int i = 0; i < eights; ++i)
                run[i] += load_lanes(matrix + (long)row * columns + n + 8 * i, width - 8 * i, 0.0f);
        UNROLL for (int i = 0; i < eights; ++i) end_run(&run[i], &sum[i], &excess[i]);
    }
    UNROLL for (int i = 0; i < eights; ++i) store_lanes(sum[i], sums + n + 8 * i, width - 8 * i);
}

/* Sums the columns of a matrix from `n` to `end`: whole cache lines, as many at once as there are. */
INLINE void sum_columns(__global const float *matrix, __global float *sums, int rows, int columns, int n, int end)
{
    for (; n + 64 <= end; n += 64) sum_strip(matrix, sums, rows, columns, n, 8);
    for (; n + 16 <= end; n += 16) sum_strip(matrix, sums, rows, columns, n, 2);
    for (; n < end; n += 8) sum_strip(matrix, sums, rows, columns, n, 1);
}

/* sums[column] = sum of matrix[row, column] over the rows. A work-item takes `each` columns. */
__kernel void column_sums(__global const float *matrix, __global float *sums, int rows, int columns, int each)
{
    const int n = get_global_id(0) * each;
    sum_columns(matrix, sums, rows, columns, n, smaller(n + each, columns));
}

/* C = A B where B is not transposed, A has few rows, but at least SHORT_ROWS, and sums have at most DEPTH terms: a
   work-item processes many panels, and the first tile of each also copies it. Other cases are left out, as telling them
   apart takes as long as a small product. */
INLINE void few_rows(
    __global const float *a, __global const float *b, __global float *c, __global const float *mask, int has_mask,
    int rows, int columns, int depth, long a_row, long a_column)
{
    vector panel[SIDES * DEPTH];
    FOR_EACH(i, columns / PANEL) {
        __global const float *right = b + i * PANEL;
        __global float *to = c + i * PANEL;
        __global const float *positive = mask + i * PANEL;
#define FULL_TILE(m, rows_, fills_panel) \
    tile(a + (m) * a_row, a_row, a_column, right, columns, panel, to + (m) * columns, columns, 0, \
         positive + (m) * columns, has_mask, depth, PANEL, rows_, 1, 1, rows_, SIDES, fills_panel)
        int m = rows < TILE_ROWS ? SHORT_ROWS : TILE_ROWS;
        if (rows < TILE_ROWS) FULL_TILE(0, SHORT_ROWS, 1);
        else FULL_TILE(0, TILE_ROWS, 1);
        for (const int end = full_tiles_end(m, rows); m + TILE_ROWS <= end; m += TILE_ROWS) FULL_TILE(m, TILE_ROWS, 0);
        for (; m < rows; m += SHORT_ROWS) /* the last tile repeats rows if too few remain */
            FULL_TILE(smaller(m, rows - SHORT_ROWS), SHORT_ROWS, 0);
    }
}

__kernel void gemm_few_rows(
    __global const float *a, __global const float *b, __global float *c, int rows, int columns, int depth)
{
    few_rows(a, b, c, a, 0, rows, columns, depth, depth, 1);
}

__kernel void gemm_few_rows_transposed(
    __global const float *a, __global const float *b, __global float *c, int rows, int columns, int depth)
{
    few_rows(a, b, c, a, 0, rows, columns, depth, 1, rows);
}

#define WITH_SUMS 1
#define WITH_INPUTS 2
#define WITH_MASK 4

/* The gradients of a layer y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias in one launch: those of
   the weight, and as `parts` says those of the bias, the sums of dy's columns, and of x, zero where the mask is. */
__kernel void linear_gradients(
    __global const float *dy, __global const float *x, __global const float *weight, __global const float *mask,
    __global float *dw, __global float *db, __global float *dx, int parts, int rows, int inputs, int outputs)
{
    if (parts & WITH_SUMS && get_global_id(0) == 0) sum_columns(dy, db, rows, outputs, 0, outputs);
    few_rows(dy, x, dw, dy, 0, outputs, inputs, rows, 1, outputs);
    if (parts & WITH_INPUTS) few_rows(dy, weight, dx, mask, parts & WITH_MASK, rows, inputs, outputs, outputs, 1);
}

/* ReLU's gradient from its result; NaN passes through, as in PyTorch. */
__kernel void relu_gradient(__global const float *grad, __global const float *activated, __global float *out, int count)
{
    FOR_ELEMENTS(i, count) out[i] = activated[i] <= 0.0f ? 0.0f : grad[i];
}
