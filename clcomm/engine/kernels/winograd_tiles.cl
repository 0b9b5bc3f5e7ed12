/* Shared by the kernels of Winograd's algorithm: tiles of pixels, and the transform of their view, B^T d B.

   The transforms add neighbours, which is wrong for infinities, NaN and numbers near the largest. So each kernel has a
   flag for each tile of weights and each block or group of pixels, `is_ordinary`, which is 0 where it met one of these;
   conv2d_products.cl then computes everything. */

#define SIDES (PANEL / TILE_LANES)
#define POINTS 16
/* The bits of 2^48. Transformed, smaller numbers are below 2^50; sums of 2^24 products of them, transformed back, stay
   finite. */
#define LARGE 0x57800000u

typedef struct {
    int images, channels, height, width, outputs, out_height, out_width, pad_h, pad_w;
} Sizes;

/* Tiles that follow one another in a row of tiles: their place in the block, and where they are. */
typedef struct {
    int at, count, image, row, column;
} Run;

INLINE void note_largest(uint8 *largest, float8 value)
{
    const uint8 bits = as_uint8(value) & 0x7fffffffu;
    *largest = bits > *largest ? bits : *largest;
}

INLINE int all_ordinary(uint8 largest)
{
    int found = 1;
    UNROLL for (int i = 0; i < 8; ++i) found &= ((const uint *)&largest)[i] < LARGE;
    return found;
}

/* The runs of `count` tiles from number `first` on, and how many they are. */
INLINE int find_runs(Run *runs, int first, int count, int down, int along)
{
    int found = 0;
    for (int at = 0; at < count; at += runs[found++].count) {
        const int tile = first + at, row = tile / along;
        runs[found].at = at;
        runs[found].column = tile - row * along;
        runs[found].count = smaller(along - runs[found].column, count - at);
        runs[found].image = row / down;
        runs[found].row = row % down;
    }
    return found;
}

/* `count` pixels of a row of x from `column` on; zeros outside. */
INLINE void copy_line(float *line, __global const float *row, int column, int width, int count)
{
    const int begin = smaller(larger(-column, 0), count), end = larger(smaller(width - column, count), begin);
    int k = 0;
    for (; k < begin; ++k) line[k] = 0.0f;
    for (; k + 8 <= end; k += 8) *(unaligned8 *)(line + k) = load8(row + column + k);
    for (; k < end; ++k) line[k] = row[column + k];
    for (; k < count; ++k) line[k] = 0.0f;
}

#define EVEN(a, b) (float8)(a.s0, a.s2, a.s4, a.s6, b.s0, b.s2, b.s4, b.s6)
#define ODD(a, b) (float8)(a.s1, a.s3, a.s5, a.s7, b.s1, b.s3, b.s5, b.s7)

/* seen[4 * i + j][tile]: the pixel in row i and column j of the view of each tile of a run. */
INLINE void see_run(float *seen, __global const float *plane, const Run *run, const Sizes *s)
{
    float line[2 * TILES + 2];
    const int column = 2 * run->column - s->pad_w, count = 2 * run->count + 2;
    for (int i = 0; i < 4; ++i) {
        const int y = 2 * run->row + i - s->pad_h;
        float *to = seen + 4 * i * TILES + run->at;
        int k = 0;
        if (y < 0 || y >= s->height) {
            for (; k < run->count; ++k) UNROLL for (int j = 0; j < 4; ++j) to[j * TILES + k] = 0.0f;
            continue;
        }
        copy_line(line, plane + y * s->width, column, s->width, count);
        for (; k + 8 <= run->count; k += 8)
            UNROLL for (int j = 0; j < 4; j += 2) {
                const float8 a = *(unaligned8 *)(line + 2 * k + j), b = *(unaligned8 *)(line + 2 * k + j + 8);
                *(unaligned8 *)(to + j * TILES + k) = EVEN(a, b);
                *(unaligned8 *)(to + (j + 1) * TILES + k) = ODD(a, b);
            }
        for (; k < run->count; ++k) UNROLL for (int j = 0; j < 4; ++j) to[j * TILES + k] = line[2 * k + j];
    }
}

/* Four numbers of a row or column, as B^T has them. */
INLINE void spread(const float8 *d, int step, float8 *v, int v_step)
{
    v[0] = d[0] - d[2 * step];
    v[v_step] = d[step] + d[2 * step];
    v[2 * v_step] = d[2 * step] - d[step];
    v[3 * v_step] = d[step] - d[3 * step];
}
