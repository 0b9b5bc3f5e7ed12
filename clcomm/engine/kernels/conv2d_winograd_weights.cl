/* The gradient of 3x3 kernels by Winograd's algorithm, on CPUs: the adjoint of conv2d_winograd.cl,
       dw = G^T [ (A dY A^T) * (B^T d B) ] G,
   in each place e a product of outputs with channels, [outputs, tiles] [tiles, channels], summed over all tiles. TILES of
   them are summed at a time, which is a constant here: it decides where long sums are split. */

#include "winograd_tiles.cl"

/* seen[2 * a + b][tile]: the pixel in row a and column b of each tile of a run; zeros outside. */
INLINE void see_pixels(float *seen, __global const float *plane, const Run *run, const Sizes *s)
{
    float line[2 * TILES];
    for (int a = 0; a < 2; ++a) {
        const int y = 2 * run->row + a;
        float *even = seen + 2 * a * TILES + run->at, *odd = even + TILES;
        if (y < s->out_height) {
            copy_line(line, plane + y * s->out_width, 2 * run->column, s->out_width, 2 * run->count);
            for (int k = 0; k < run->count; ++k) even[k] = line[2 * k], odd[k] = line[2 * k + 1];
        } else {
            for (int k = 0; k < run->count; ++k) even[k] = odd[k] = 0.0f;
        }
    }
}

/* Two numbers of a row or column of dY, as A has four. */
INLINE void scatter(const float8 *y, int step, float8 *z, int z_step)
{
    z[0] = y[0];
    z[z_step] = y[0] + y[step];
    z[2 * z_step] = y[0] - y[step];
    z[3 * z_step] = -y[step];
}

/* Four numbers of a row or column, as G^T has three of them. */
INLINE void narrow(const float8 *u, int step, float8 *g, int g_step)
{
    const float8 half_sum = 0.5f * (u[step] + u[2 * step]);
    g[0] = u[0] + half_sum;
    g[g_step] = 0.5f * (u[step] - u[2 * step]);
    g[2 * g_step] = half_sum + u[3 * step];
}

/* Adds to c a tile of `depth` pixels of TILE_ROWS outputs, POINTS * TILES apart, times a panel of `columns` channels. */
INLINE void add_outer(
    __global const float *a, __global const float *panel, __global float *c, int c_row, int depth, int valid,
    int columns, int is_first)
{
    vector sum[TILE_ROWS][SIDES];
    int row[TILE_ROWS];
    UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
        UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] = 0.0f;
        row[r] = smaller(r, valid - 1) * POINTS * TILES;
    }
    for (int k = 0; k < depth; ++k) {
        vector right[SIDES];
        UNROLL for (int side = 0; side < SIDES; ++side)
            right[side] = load_vector(panel + TILE_LANES * side, TILE_LANES);
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
            const float value = a[row[r]];
            UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] += value * right[side];
        }
        ++a;
        panel += PANEL;
    }
    UNROLL for (int side = 0; side < SIDES; ++side) if (columns > TILE_LANES * side)
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < valid) {
            __global float *to = c + (long)r * c_row + TILE_LANES * side;
            const int count = columns - TILE_LANES * side;
            store_vector(is_first ? sum[r][side] : load_vector(to, count) + sum[r][side], to, count);
        }
}

/* sums[e][O][C] of all tiles. A work-item takes a panel group of GROUP channels. `scratch` has for each work-item the
   transformed pixels of x, v[e][panel][tile][PANEL], those of dy, z[output][e][TILES], and of eight channels
   w[channel][e][TILES]. is_ordinary has a flag for each group. */
__kernel void winograd_weight_sums(
    __global const float *x, __global const float *dy, __global float *sums, __global float *scratch,
    __global int *is_ordinary, int images, int channels, int height, int width, int outputs, int out_height,
    int out_width, int pad_h, int pad_w)
{
    const Sizes s = {images, channels, height, width, outputs, out_height, out_width, pad_h, pad_w};
    const int down = (out_height + 1) / 2, along = (out_width + 1) / 2, tiles = images * down * along;
    const int group = PANELS * PANEL, v_point = group * TILES + PANEL;
    __global float *v = scratch + (long)get_global_id(0) * POINTS * (v_point + (outputs + 8) * TILES);
    __global float *z = v + POINTS * v_point, *w = z + (long)outputs * POINTS * TILES;
    Run runs[TILES];
    float8 block[POINTS * TILES / 8];
    float *seen = (float *)block;
    FOR_EACH(number, (channels + group - 1) / group) {
        const int first = number * group, own = smaller(group, channels - first);
        uint8 largest = 0;
        for (int start = 0; start < tiles; start += TILES) {
            const int count = smaller(TILES, tiles - start), found = find_runs(runs, start, count, down, along);
            for (int i = 0; i < POINTS * TILES / 8; ++i) block[i] = 0.0f;
            for (int o = 0; o < outputs; ++o) {
                for (int run = 0; run < found; ++run)
                    see_pixels(seen, dy + ((long)runs[run].image * outputs + o) * out_height * out_width, runs + run,
                               &s);
                for (int at = 0; at < count; at += 8) {
                    float8 pixels[4], half_scattered[8], all[POINTS];
                    UNROLL for (int p = 0; p < 4; ++p) {
                        pixels[p] = block[p * TILES / 8 + at / 8];
                        note_largest(&largest, pixels[p]);
                    }
                    UNROLL for (int b = 0; b < 2; ++b) scatter(pixels + b, 2, half_scattered + b, 2);
                    UNROLL for (int i = 0; i < 4; ++i) scatter(half_scattered + 2 * i, 1, all + 4 * i, 1);
                    UNROLL for (int e = 0; e < POINTS; ++e) store8(all[e], z + ((long)o * POINTS + e) * TILES + at);
                }
            }
            for (int i = 0; i < POINTS * TILES / 8; ++i) block[i] = 0.0f;
            for (int c = 0; c < (own + 7) / 8 * 8; c += 8) {
                for (int i = 0; i < 8; ++i) {
                    __global float *to = w + i * POINTS * TILES;
                    const int channel = first + c + i;
                    for (int run = 0; run < found && channel < channels; ++run)
                        see_run(seen, x + ((long)runs[run].image * channels + channel) * height * width, runs + run, &s);
                    for (int at = 0; at < count; at += 8) {
                        float8 d[POINTS], half_spread[POINTS], all[POINTS];
                        UNROLL for (int e = 0; e < POINTS; ++e) d[e] = block[e * TILES / 8 + at / 8];
                        UNROLL for (int e = 0; e < POINTS; ++e) note_largest(&largest, d[e]);
                        UNROLL for (int j = 0; j < 4; ++j) spread(d + j, 4, half_spread + j, 4);
                        UNROLL for (int j = 0; j < 4; ++j) spread(half_spread + 4 * j, 1, all + 4 * j, 1);
                        UNROLL for (int e = 0; e < POINTS; ++e) store8(all[e], to + e * TILES + at);
                    }
                }
                for (int e = 0; e < POINTS; ++e)
                    for (int at = 0; at < count; at += 8) {
                        float8 turned[8];
                        UNROLL for (int i = 0; i < 8; ++i) turned[i] = load8(w + (i * POINTS + e) * TILES + at);
                        transpose8(turned);
                        __global float *to = v + e * v_point + (c / PANEL * TILES + at) * PANEL + c % PANEL;
                        UNROLL for (int i = 0; i < 8; ++i) store8(turned[i], to + i * PANEL);
                    }
            }
            for (int e = 0; e < POINTS; ++e)
                for (int o = 0; o < outputs; o += TILE_ROWS)
                    for (int c = 0; c < own; c += PANEL)
                        add_outer(z + ((long)o * POINTS + e) * TILES, v + e * v_point + c * TILES,
                                  sums + ((long)e * outputs + o) * channels + first + c, channels, count,
                                  smaller(TILE_ROWS, outputs - o), smaller(PANEL, own - c), start == 0);
        }
        is_ordinary[number] = all_ordinary(largest);
    }
}

/* dw[O][C][3][3] = G^T sums G */
__kernel void winograd_weight_gradient(__global const float *sums, __global float *dw, int outputs, int channels)
{
    FOR_EACH(o, outputs)
        for (int c = 0; c < channels; c += 8) {
            float8 u[POINTS], half_narrowed[12], taps[9];
            const int count = smaller(8, channels - c);
            UNROLL for (int e = 0; e < POINTS; ++e)
                u[e] = load_lanes(sums + ((long)e * outputs + o) * channels + c, count, 0.0f);
            UNROLL for (int j = 0; j < 4; ++j) narrow(u + j, 4, half_narrowed + j, 4);
            UNROLL for (int i = 0; i < 3; ++i) narrow(half_narrowed + 4 * i, 1, taps + 3 * i, 1);
            __global float *to = dw + ((long)o * channels + c) * 9;
            for (int i = 0; i < count; ++i)
                UNROLL for (int tap = 0; tap < 9; ++tap) to[9 * i + tap] = ((const float *)(taps + tap))[i];
        }
}
