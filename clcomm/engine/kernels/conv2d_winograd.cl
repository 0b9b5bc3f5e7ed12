/* Convolutions of 3x3 kernels with stride 1 on CPUs by Winograd's algorithm F(2x2, 3x3), and their data gradients:
   a tile of 2x2 pixels of y takes 16 products for each pair of channels in place of 36,
       Y = A^T [ (G w G^T) * (B^T d B) ] A,    d: the 4x4 pixels of x that the tile sees.
   Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016.

   Each of the 16 places e of the transformed tiles is a product of matrices: weights [outputs, channels] with tiles
   [channels, tiles]. A work-item takes blocks of TILES tiles, which follow one another in rows, planes and images; of the
   convolution they are panels of PANEL. Each sum has a lane of its own and runs over the channels in their order, so
   that no size of a tile, panel or block changes a bit. */

#include "winograd_tiles.cl"

/* The three numbers of a row or column of a kernel, as four. */
INLINE void widen(const float8 *g, int g_step, float8 *u, int u_step)
{
    const float8 outer = g[0] + g[2 * g_step], middle = g[g_step];
    u[0] = g[0];
    u[u_step] = 0.5f * (outer + middle);
    u[2 * u_step] = 0.5f * (outer - middle);
    u[3 * u_step] = g[2 * g_step];
}

/* packed[e][rows / TILE_ROWS][channels][TILE_ROWS] of kernels whose tap number t is first_tap + t * tap_step; row and
   channel of a weight are w_row and w_channel apart. */
__kernel void winograd_weights(
    __global const float *weight, __global float *packed, __global int *is_ordinary, int rows, int channels,
    int first_tap, int tap_step, int w_row, int w_channel)
{
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const long point = (long)tiles * channels * TILE_ROWS;
    FOR_EACH(tile, tiles) {
        uint8 largest = 0;
        for (int c = 0; c < channels; ++c) {
            __global float *to = packed + ((long)tile * channels + c) * TILE_ROWS;
            __global const float *from = weight + first_tap + (long)c * w_channel;
            for (int r = 0; r < TILE_ROWS; r += 8) {
                float8 taps[9], half_wide[12], wide[POINTS];
                const int count = smaller(8, TILE_ROWS - r);
                UNROLL for (int tap = 0; tap < 9; ++tap) taps[tap] = 0.0f;
                for (int i = 0; i < count; ++i) {
                    __global const float *own = from + (long)smaller(tile * TILE_ROWS + r + i, rows - 1) * w_row;
                    UNROLL for (int tap = 0; tap < 9; ++tap) ((float *)(taps + tap))[i] = own[tap * tap_step];
                }
                UNROLL for (int tap = 0; tap < 9; ++tap) note_largest(&largest, taps[tap]);
                UNROLL for (int j = 0; j < 3; ++j) widen(taps + j, 3, half_wide + j, 3);
                UNROLL for (int i = 0; i < 4; ++i) widen(half_wide + 3 * i, 1, wide + 4 * i, 1);
                /* The next channel overwrites the vector's elements beyond the tile's rows. */
                if (c + 1 < channels) UNROLL for (int e = 0; e < POINTS; ++e) store8(wide[e], to + e * point + r);
                else
                    UNROLL for (int e = 0; e < POINTS; ++e)
                        for (int i = 0; i < count; ++i) to[e * point + r + i] = ((const float *)(wide + e))[i];
            }
        }
        is_ordinary[tile] = all_ordinary(largest);
    }
}

/* Four numbers of a row or column, as A^T has two of them. */
INLINE void gather(const float8 *m, int step, float8 *y, int y_step)
{
    y[0] = m[0] + m[step] + m[2 * step];
    y[y_step] = m[step] - m[2 * step] - m[3 * step];
}

/* c[row] = a tile of `depth` x TILE_ROWS weights times a panel, for `valid` rows that are c_row apart. */
INLINE void multiply_tile(
    __global const float *a, __global const float *panel, __global float *c, int c_row, int depth, int valid)
{
    vector sum[TILE_ROWS][SIDES];
    UNROLL for (int r = 0; r < TILE_ROWS; ++r) UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] = 0.0f;
    for (int k = 0; k < depth; ++k) {
        vector right[SIDES];
        UNROLL for (int side = 0; side < SIDES; ++side)
            right[side] = load_vector(panel + TILE_LANES * side, TILE_LANES);
        UNROLL for (int r = 0; r < TILE_ROWS; ++r)
            UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] += a[r] * right[side];
        a += TILE_ROWS;
        panel += PANEL;
    }
    UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < valid)
        UNROLL for (int side = 0; side < SIDES; ++side)
            store_vector(sum[r][side], c + r * c_row + TILE_LANES * side, TILE_LANES);
}

/* Stores two rows of a run's pixels: result[2 * a + b][tile] is the pixel in row a and column b of a tile. */
INLINE void store_run(const float *result, __global float *plane, const Run *run, const Sizes *s)
{
    const int column = 2 * run->column, count = smaller(2 * run->count, s->out_width - column);
    for (int a = 0; a < smaller(2, s->out_height - 2 * run->row); ++a) {
        __global float *to = plane + (2 * run->row + a) * s->out_width + column;
        const float *even = result + 2 * a * TILES + run->at, *odd = even + TILES;
        int k = 0;
        for (; 2 * k + 16 <= count; k += 8) {
            const float8 e = *(const unaligned8 *)(even + k), o = *(const unaligned8 *)(odd + k);
            store8((float8)(e.s0, o.s0, e.s1, o.s1, e.s2, o.s2, e.s3, o.s3), to + 2 * k);
            store8((float8)(e.s4, o.s4, e.s5, o.s5, e.s6, o.s6, e.s7, o.s7), to + 2 * k + 8);
        }
        for (int p = 2 * k; p < count; ++p) to[p] = p & 1 ? odd[p / 2] : even[p / 2];
    }
}

/* `scratch` has room for a block of each work-item: transformed pixels v[e][panel][channel][PANEL], a panel more for
   each e so that they do not share a set of the cache, and products m[output][e][TILES]. */
__kernel void winograd_convolve(
    __global const float *x, __global const float *packed, __global const float *bias, __global float *y,
    __global float *scratch, __global int *is_ordinary, int images, int channels, int height, int width, int outputs,
    int out_height, int out_width, int pad_h, int pad_w, int has_bias)
{
    const Sizes s = {images, channels, height, width, outputs, out_height, out_width, pad_h, pad_w};
    const int down = (out_height + 1) / 2, along = (out_width + 1) / 2, tiles = images * down * along;
    const int v_point = channels * TILES + PANEL, rows = (outputs + TILE_ROWS - 1) / TILE_ROWS;
    __global float *v = scratch + (long)get_global_id(0) * POINTS * (v_point + outputs * TILES);
    __global float *m = v + POINTS * v_point;
    Run runs[TILES];
    float8 block[POINTS * TILES / 8], result[4 * TILES / 8];
    float *seen = (float *)block;
    FOR_EACH(number, (tiles + TILES - 1) / TILES) {
        const int count = smaller(TILES, tiles - number * TILES), panels = (count + PANEL - 1) / PANEL;
        const int found = find_runs(runs, number * TILES, count, down, along);
        uint8 largest = 0;
        for (int i = 0; i < POINTS * TILES / 8; ++i) block[i] = 0.0f;
        for (int c = 0; c < channels; ++c) {
            for (int run = 0; run < found; ++run)
                see_run(seen, x + ((long)runs[run].image * channels + c) * height * width, runs + run, &s);
            for (int at = 0; at < panels * PANEL; at += 8) {
                float8 d[POINTS], half_spread[POINTS], all[POINTS];
                UNROLL for (int e = 0; e < POINTS; ++e) d[e] = block[e * TILES / 8 + at / 8];
                UNROLL for (int e = 0; e < POINTS; ++e) note_largest(&largest, d[e]);
                UNROLL for (int j = 0; j < 4; ++j) spread(d + j, 4, half_spread + j, 4);
                UNROLL for (int i = 0; i < 4; ++i) spread(half_spread + 4 * i, 1, all + 4 * i, 1);
                __global float *to = v + (at / PANEL * channels + c) * PANEL + at % PANEL;
                UNROLL for (int e = 0; e < POINTS; ++e) store8(all[e], to + e * v_point);
            }
        }
        is_ordinary[number] = all_ordinary(largest);
        for (int e = 0; e < POINTS; ++e)
            for (int row = 0; row < rows; ++row)
                for (int panel = 0; panel < panels; ++panel)
                    multiply_tile(packed + ((long)e * rows + row) * channels * TILE_ROWS,
                                  v + e * v_point + panel * channels * PANEL,
                                  m + ((long)row * TILE_ROWS * POINTS + e) * TILES + panel * PANEL, POINTS * TILES,
                                  channels, smaller(TILE_ROWS, outputs - row * TILE_ROWS));
        for (int o = 0; o < outputs; ++o) {
            const float start = has_bias ? bias[o] : 0.0f;
            for (int at = 0; at < count; at += 8) {
                float8 own[POINTS], half_gathered[8], pixels[4];
                UNROLL for (int e = 0; e < POINTS; ++e) own[e] = load8(m + ((long)o * POINTS + e) * TILES + at);
                UNROLL for (int j = 0; j < 4; ++j) gather(own + j, 4, half_gathered + j, 4);
                UNROLL for (int a = 0; a < 2; ++a) gather(half_gathered + 4 * a, 1, pixels + 2 * a, 1);
                UNROLL for (int p = 0; p < 4; ++p) result[p * TILES / 8 + at / 8] = pixels[p] + start;
            }
            for (int run = 0; run < found; ++run)
                store_run((const float *)result, y + ((long)runs[run].image * outputs + o) * out_height * out_width,
                          runs + run, &s);
        }
    }
}
