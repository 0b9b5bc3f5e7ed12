/* Convolutions on CPUs as matrix products, with pixels in the lanes:
       y[n,o,oy,ox] = bias[o] + sum over i,j,c of weight[o,c,i,j] * x[n,c,iy,ix]
   where iy = oy*stride + i + shift_h, likewise ix. They need no images to fill their vectors and read many channels in
   order, where conv2d.cl needs blocks of 8 images and few channels. A term of the sum is a tap of the kernel and a
   channel: term = (i*kernel_w + j)*channels + c.

   A work-item takes PANELS panels of PANEL pixels. It copies the pixels of DEPTH terms to them, and adds the products
   with tiles of TILE_ROWS outputs, whose weights lie in the order of their use. Each sum has a lane of its own, so that
   no size of a tile or panel changes a bit. Pixels outside x are zeros in the panels. Where a weight is infinite or NaN
   that would be wrong: then each tap is added by itself, and lanes outside x keep their old sums.

   The data gradient is the convolution of dy with the reversed kernel. With a stride, pixels of dx whose rows and
   columns leave the same remainders see the same taps: each such phase is a convolution with a part of the kernel, and
   `join_phases` puts them together. */

#include "products_tiles.cl"

#define UNROLL_4 _Pragma("unroll 4")
/* Channels between the weights that are packed and those that are asked for: time for several reads from memory. */
#define AHEAD 8
#if defined(__x86_64__) || defined(__aarch64__)
#define ASK_FOR(address) __builtin_prefetch(address)
#else
#define ASK_FOR(address)
#endif

/* Packs a tap's view of eight pixels in `count` channels. */
INLINE void pack_eight(float *to, __global const float *x, int plane, int count, const Eight *seen)
{
    const float8 zero = 0.0f;
    if (seen->is_run) {
        x += seen->at.s0;
        UNROLL_4 for (int c = 0; c < count; ++c) {
            *(float8 *)to = seen->inside ? load8(x) : zero;
            to += PANEL;
            x += plane;
        }
    } else {
        for (int c = 0; c < count; ++c) *(float8 *)(to + c * PANEL) = eight_of(x + (long)c * plane, seen);
    }
}

/* packed[rows / TILE_ROWS][terms][TILE_ROWS] of the taps first_tap + i*tap_i + j*tap_j; row and channel of a weight are
   w_row and w_channel apart. is_finite[tile] is 0 if a weight of the tile is infinite or NaN. */
__kernel void pack_weights(
    __global const float *weight, __global float *packed, __global int *is_finite, int rows, int channels,
    int kernel_h, int kernel_w, int first_tap, int tap_i, int tap_j, int w_row, int w_channel OF_GATE)
{
    GATE
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    FOR_EACH(tile, tiles) {
        uint largest = 0; /* of the weights' bits without their signs */
        __global float *to_tile = packed + (long)tile * kernel_h * kernel_w * channels * TILE_ROWS;
        for (int c = 0; c < channels; ++c) {
            /* A tile's weights of one channel can be pages from those of the next: no processor foresees that. */
            __global const float *ahead = weight + first_tap + (long)smaller(c + AHEAD, channels - 1) * w_channel;
            UNROLL for (int r = 0; r < TILE_ROWS; ++r)
                ASK_FOR(ahead + (long)smaller(tile * TILE_ROWS + r, rows - 1) * w_row);
            for (int i = 0; i < kernel_h; ++i)
                for (int j = 0; j < kernel_w; ++j) {
                    __global float *to = to_tile + ((long)(i * kernel_w + j) * channels + c) * TILE_ROWS;
                    __global const float *from = weight + (long)c * w_channel + first_tap + i * tap_i + j * tap_j;
                    UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
                        to[r] = from[(long)smaller(tile * TILE_ROWS + r, rows - 1) * w_row];
                        const uint bits = as_uint(to[r]) & 0x7fffffffu;
                        largest = bits > largest ? bits : largest;
                    }
                }
        }
        is_finite[tile] = largest < 0x7f800000u;
    }
}

__kernel void convolve_products(
    __global const float *images_x, __global const float *packed, __global const int *is_finite,
    __global const float *bias, __global float *images_y, int first_y, int channels, int height, int width, int outputs,
    int out_height, int out_width, int kernel_h, int kernel_w, int stride, int shift_h, int shift_w,
    int has_bias OF_GATE)
{
    GATE
    vector panels[PANELS * SIDES * DEPTH];
    vector_mask inside[PANELS * SIDES];
    Places places[PANELS * EIGHTS];
    const Planes planes = {channels, height, width};
    const int pixels = out_height * out_width, first = get_global_id(0) * PANELS * PANEL;
    const int last = smaller(first + PANELS * PANEL, pixels), tiles = (outputs + TILE_ROWS - 1) / TILE_ROWS;
    const int terms = kernel_h * kernel_w * channels;
    __global const float *x = images_x + (long)get_global_id(1) * channels * height * width;
    __global float *y = images_y + first_y + (long)get_global_id(1) * outputs * pixels;
    int all_finite = 1;
    for (int t = 0; t < tiles; ++t) all_finite &= is_finite[t];
    for (int o = 0; o < outputs; ++o) {
        const float start = has_bias ? bias[o] : 0.0f;
        for (int p = first; p < last; ++p) y[(long)o * pixels + p] = start;
    }
    for (int e = 0; first + 8 * e < last; ++e) find_places(places + e, planes, first + 8 * e, last, out_width, stride);
    for (int k = 0, run; k < terms; k += run) {
        Term begin;
        find_term(&begin, k, channels, kernel_w);
        run = smaller(DEPTH, all_finite ? terms - k : channels - begin.channel);
        for (int e = 0; first + 8 * e < last; ++e) {
            float *to = (float *)(panels + e / EIGHTS * SIDES * DEPTH) + e % EIGHTS * 8;
            Term term = begin;
            for (int left = run, count; left > 0; left -= count) {
                Eight seen;
                find_seen(&seen, planes, places + e, term.i + shift_h, term.j + shift_w);
                count = smaller(left, channels - term.channel);
                ((int8 *)inside)[e] = all_finite ? (int8)-1 : seen.inside;
                pack_eight(to, x + (long)term.channel * height * width, height * width, count, &seen);
                to += count * PANEL;
                next_tap(&term, kernel_w);
            }
        }
        for (int t = 0; t < tiles; ++t)
            for (int g = 0, p = first; p < last; ++g, p += PANEL) {
                const int valid = smaller(TILE_ROWS, outputs - t * TILE_ROWS);
#define ADD_TILE(columns, rows, sides) \
    add_tile(packed + ((long)t * terms + k) * TILE_ROWS, 1, TILE_ROWS, panels + g * SIDES * DEPTH, \
             y + (long)t * TILE_ROWS * pixels + p, pixels, inside + g * SIDES, run, columns, valid, rows, sides)
                if (last - p >= PANEL && valid > SHORT_ROWS) ADD_TILE(PANEL, TILE_ROWS, SIDES);
                else if (last - p >= PANEL) ADD_TILE(PANEL, SHORT_ROWS, SIDES);
                else if (last - p > TILE_LANES) ADD_TILE(last - p, TILE_ROWS, SIDES);
                else ADD_TILE(last - p, TILE_ROWS, 1);
            }
    }
}

/* x[n][c] from the phases[stride][stride] of its rows and columns, each [n][c] of its own size; `planes` is n * c. */
__kernel void join_phases(
    __global const float *phases, __global float *x, int planes, int height, int width, int stride)
{
    FOR_EACH(row, planes * height) {
        const int plane = row / height, y = row % height, rows = (height - y % stride + stride - 1) / stride;
        /* Phases of smaller remainders of the row come first, and have `width` pixels together for each row. */
        long before = 0;
        for (int r = 0; r < y % stride; ++r) before += (long)planes * ((height - r + stride - 1) / stride) * width;
        for (int r = 0; r < stride; ++r) {
            const int columns = (width - r + stride - 1) / stride;
            __global const float *from = phases + before + ((long)plane * rows + y / stride) * columns;
            for (int i = 0; i < columns; ++i) x[(long)row * width + r + i * stride] = from[i];
            before += (long)planes * rows * columns;
        }
    }
}
