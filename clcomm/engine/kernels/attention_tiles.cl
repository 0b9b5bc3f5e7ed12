/* Shared by attention and its gradients on CPUs: layouts of rows, products in tiles, and masks.

   HEAD is the length of a query and of a key, VALUE that of a value. `places` says where a tensor's rows lie: for each
   of q, k, v and out the first element, and the distances of batches, heads and rows. A mask is added to the scores; its
   rows lie at mask + batch * mask_batch + head * mask_head + query * mask_row. Causal: query i sees the keys up to i. */

enum { Q, K, V, OUT };

INLINE int place_of(__global const int *places, int tensor, int batch, int head)
{
    return places[4 * tensor] + batch * places[4 * tensor + 1] + head * places[4 * tensor + 2];
}

INLINE int row_step(__global const int *places, int tensor) { return places[4 * tensor + 3]; }

/* Lanes run along the queries, so that no sum crosses them, and no number of lanes changes a bit. A block of QUERIES
   rows is turned once; keys and values are read where they lie, number by number. Sums of a product are in registers,
   in tiles of rows by SIDES vectors, as in gemm.cl. */

#define QUERIES 32
#define KEYS 48
#define SIDES 2
#define WIDTH (SIDES * TILE_LANES)
#define PITCH (QUERIES / TILE_LANES) /* vectors of a row of QUERIES */
#define HIGH (TILE_LANES == 16 ? 12 : 6)
#define LOW 4

#if TILE_LANES == 16
DEFINE_POWER_OF_2(power_of_2, float16, int16, as_int16, as_float16)
#define LANE_NUMBERS (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#else
DEFINE_POWER_OF_2(power_of_2, float8, int8, as_int8, as_float8)
#define LANE_NUMBERS (int8)(0, 1, 2, 3, 4, 5, 6, 7)
#endif

/* to[column][query] = factor * from[query][column]; queries after the last one repeat it. */
INLINE void turn(vector *to, __global const float *from, int step, int columns, int count, float factor)
{
    float *flat = (float *)to;
    int column = 0;
    for (; column + 8 <= columns; column += 8)
        for (int query = 0; query < QUERIES; query += 8) {
            float8 part[8];
            UNROLL for (int i = 0; i < 8; ++i) part[i] = load8(from + smaller(query + i, count - 1) * step + column);
            transpose8(part);
            UNROLL for (int i = 0; i < 8; ++i) *(float8 *)(flat + (column + i) * QUERIES + query) = part[i] * factor;
        }
    for (; column < columns; ++column)
        for (int query = 0; query < QUERIES; ++query)
            flat[column * QUERIES + query] = factor * from[smaller(query, count - 1) * step + column];
}

/* to[query][column] = factors[query] * from[column][query], for `count` queries. */
INLINE void turn_back(
    __global float *to, int step, const vector *from, const vector *factors, int columns, int count)
{
    const float *flat = (const float *)from, *factor = (const float *)factors;
    int column = 0;
    for (; column + 8 <= columns; column += 8)
        for (int query = 0; query < count; query += 8) {
            float8 part[8];
            UNROLL for (int i = 0; i < 8; ++i)
                part[i] = *(const float8 *)(flat + (column + i) * QUERIES + query) * *(const float8 *)(factor + query);
            transpose8(part);
            UNROLL for (int i = 0; i < 8; ++i) if (query + i < count) store8(part[i], to + (query + i) * step + column);
        }
    for (; column < columns; ++column)
        for (int query = 0; query < count; ++query)
            to[query * step + column] = flat[column * QUERIES + query] * factor[query];
}

INLINE void fill(vector *to, int count, float value)
{
    for (int i = 0; i < count; ++i) to[i] = value;
}

/* to[row][query] = sum over i of a[row, i] right[i][query], accumulated with `adds`. Rows after `valid` read
   the last one. */
INLINE void tile(
    __global const float *a, int a_row, int a_column, const vector *right, vector *to, int depth, int valid,
    const int adds, const int rows)
{
    vector sum[HIGH][SIDES];
    int row[HIGH];
    UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows) {
        row[r] = smaller(r, valid - 1) * a_row;
        UNROLL for (int side = 0; side < SIDES; ++side) {
            const vector zero = 0.0f;
            sum[r][side] = adds ? to[r * PITCH + side] : zero;
        }
    }
    for (int i = 0; i < depth; ++i) {
        vector factor[SIDES];
        UNROLL for (int side = 0; side < SIDES; ++side) factor[side] = right[i * PITCH + side];
        UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows) {
            const float value = a[row[r]];
            UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] += value * factor[side];
        }
        a += a_column;
    }
    UNROLL for (int r = 0; r < HIGH; ++r) if (r < rows)
        UNROLL for (int side = 0; side < SIDES; ++side) to[r * PITCH + side] = sum[r][side];
}

/* The end of the high tiles: two low ones take less than a high one and a part. */
INLINE int high_end(int rows) { return rows - 2 * LOW * (rows % HIGH == 2 * LOW % HIGH); }

INLINE void multiply(
    __global const float *a, int a_row, int a_column, const vector *right, vector *to, int depth, int rows,
    const int adds)
{
    int r = 0;
    for (const int end = high_end(rows); r + HIGH <= end; r += HIGH)
        tile(a + r * a_row, a_row, a_column, right, to + r * PITCH, depth, HIGH, adds, HIGH);
    for (; r < rows; r += LOW)
        tile(a + r * a_row, a_row, a_column, right, to + r * PITCH, depth, smaller(LOW, rows - r), adds, LOW);
}

/* Adds the mask to a vector of scores, and hides the keys after a causal query: -INFINITY. */
INLINE vector seen(vector score, vector added, int has_mask, int crosses, int key, vector_mask query)
{
    const vector hidden = -INFINITY;
    if (has_mask) score += added;
    return crosses && key > 0 ? (key > query ? hidden : score) : score;
}
