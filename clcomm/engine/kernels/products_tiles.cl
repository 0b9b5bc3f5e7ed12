/* Shared by convolutions as matrix products: a tap's view of eight pixels, and products in tiles.

   With GATED a kernel computes only results that Winograd's could not: nothing if all flags of winograd_tiles.cl are
   set. */

#define SIDES (PANEL / TILE_LANES)
#define EIGHTS (PANEL / 8)
#define SHORT_ROWS (TILE_ROWS < 4 ? TILE_ROWS : 4) /* of a last tile that has no more */

#ifdef GATED
#define OF_GATE , __global const int *first_flags, int first_count, __global const int *flags, int count_of_flags
#define GATE if (all_set(first_flags, first_count) && all_set(flags, count_of_flags)) return;
INLINE int all_set(__global const int *flags, int count)
{
    int set = 1;
    for (int i = 0; i < count; ++i) set &= flags[i];
    return set;
}
#else
#define OF_GATE
#define GATE
#endif

typedef struct {
    int channels, height, width;
} Planes;

/* A term of a sum: a tap in row i and column j of the kernel, and a channel. */
typedef struct {
    int i, j, channel;
} Term;

/* Where eight pixels are in x, before a tap shifts them. */
typedef struct {
    int8 row, column, counts;
    int keeps_rows; /* x has rows of their width, and the stride is 1 */
} Places;

/* Where a tap sees eight pixels of a plane: `at` is 0 where it is outside. */
typedef struct {
    int8 at, inside;
    int is_run; /* all eight follow one another */
} Eight;

INLINE void find_term(Term *term, int number, int channels, int kernel_w)
{
    const int tap = number / channels;
    term->i = tap / kernel_w;
    term->j = tap % kernel_w;
    term->channel = number - tap * channels;
}

INLINE void next_tap(Term *term, int kernel_w)
{
    const int wraps = term->j + 1 == kernel_w;
    term->i += wraps;
    term->j = wraps ? 0 : term->j + 1;
    term->channel = 0;
}

/* The pixels that follow `first` in rows of `width`, times `stride`; those from `count` on do not count. */
INLINE void find_places(Places *places, Planes x, int first, int count, int width, int stride)
{
    const int8 place = (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    int8 row = first / width, column = place + first % width;
    for (int left = 7; left > 0; left -= width) {
        const int8 wraps = column >= width;
        row -= wraps;
        column = wraps ? column - width : column;
    }
    places->row = row * stride;
    places->column = column * stride;
    places->counts = place + first < count;
    places->keeps_rows = stride == 1 && width == x.width;
}

INLINE void find_seen(Eight *seen, Planes x, const Places *places, int shift_h, int shift_w)
{
    const int8 place = (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    const int8 iy = places->row + shift_h, ix = places->column + shift_w;
    const int start = iy.s0 * x.width + ix.s0;
    seen->inside = places->counts & (iy >= 0) & (iy < x.height) & (ix >= 0) & (ix < x.width);
    seen->is_run = places->keeps_rows && start >= 0 && start + 8 <= x.height * x.width;
    seen->at = seen->is_run ? place + start : seen->inside ? iy * x.width + ix : 0;
}

INLINE float8 eight_of(__global const float *plane, const Eight *seen)
{
    const float8 zero = 0.0f;
    float8 value;
    if (seen->is_run) value = load8(plane + seen->at.s0);
    else UNROLL for (int i = 0; i < 8; ++i) ((float *)&value)[i] = plane[((const int *)&seen->at)[i]];
    return seen->inside ? value : zero;
}

/* Adds the products of a tile of A of `rows` rows with `depth` rows of a panel to `valid` rows of c, in lanes that are
   inside. */
INLINE void add_tile(
    __global const float *a, const long a_row, const long a_column, const vector *panel, __global float *c, long c_row,
    const vector_mask *inside, int depth, int columns, int valid, const int rows, const int sides)
{
    vector sum[TILE_ROWS][SIDES];
    long row[TILE_ROWS];
    UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < rows) {
        UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] = 0.0f;
        row[r] = a_row == 1 ? r : smaller(r, valid - 1) * a_row;
    }
    for (int k = 0; k < depth; ++k) {
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < rows) {
            const float value = a[row[r]];
            UNROLL for (int side = 0; side < SIDES; ++side)
                if (side < sides) sum[r][side] += value * panel[SIDES * k + side];
        }
        a += a_column;
    }
    UNROLL for (int side = 0; side < SIDES; ++side) if (side < sides)
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < rows && r < valid) {
            __global float *to = c + r * c_row + TILE_LANES * side;
            const int count = columns - TILE_LANES * side;
            const vector old = load_vector(to, count);
            store_vector(inside[side] ? old + sum[r][side] : old, to, count);
        }
}
