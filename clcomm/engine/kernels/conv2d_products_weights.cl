/* The gradients of weights and bias of conv2d_products.cl: rows of dy times the elements of x that each term reads. */

#include "products_tiles.cl"

/* Packs the elements that `columns` terms from `first` on read for `count` pixels at `places`. */
INLINE void pack_pixels(
    float *to, __global const float *x, Planes planes, int first, int columns, const Places *places, int count,
    int kernel_w, int pad_h, int pad_w)
{
#define FIND_SEEN find_seen(&seen, planes, places + p / 8, term.i - pad_h, term.j - pad_w)
#define NEXT_TAP if (term.channel == planes.channels) { next_tap(&term, kernel_w); FIND_SEEN; }
    const int plane = planes.height * planes.width;
    Term begin;
    find_term(&begin, first, planes.channels, kernel_w);
    for (int p = 0; p < count; p += 8) {
        Term term = begin;
        Eight seen;
        FIND_SEEN;
        for (int k = 0; k < columns; k += 8) {
            float8 block[8];
            NEXT_TAP
            if (seen.is_run && term.channel + 8 <= planes.channels && k + 8 <= columns) {
                const float8 zero = 0.0f;
                __global const float *from = x + (long)term.channel * plane + seen.at.s0;
                UNROLL for (int i = 0; i < 8; ++i) block[i] = seen.inside ? load8(from + (long)i * plane) : zero;
                term.channel += 8;
            } else UNROLL for (int i = 0; i < 8; ++i) {
                NEXT_TAP
                block[i] = eight_of(x + (long)term.channel * plane, &seen);
                term.channel += k + i + 1 < columns; /* surplus columns repeat the last one */
            }
            transpose8(block);
            UNROLL for (int i = 0; i < 8; ++i) *(float8 *)(to + (p + i) * PANEL + k) = block[i];
        }
    }
}

/* sums[O][terms]: the weight gradient. A work-item takes PANELS panels of PANEL terms, and adds the products of rows of
   dy with the elements of the terms, in runs of `run` pixels. */
__kernel void weight_products(
    __global const float *images_x, __global const float *images_dy, __global float *sums, int images, int channels,
    int height, int width, int outputs, int out_height, int out_width, int kernel_h, int kernel_w, int stride,
    int pad_h, int pad_w, int run OF_GATE)
{
    GATE
    vector panels[PANELS * SIDES * DEPTH];
    vector_mask inside[SIDES];
    Places places[DEPTH / 8];
    const Planes planes = {channels, height, width};
    const int pixels = out_height * out_width, terms = kernel_h * kernel_w * channels;
    const int first = get_global_id(0) * PANELS * PANEL, last = smaller(first + PANELS * PANEL, terms);
    UNROLL for (int side = 0; side < SIDES; ++side) inside[side] = -1;
    for (int o = 0; o < outputs; ++o)
        for (int k = first; k < last; ++k) sums[(long)o * terms + k] = 0.0f;
    for (int n = 0; n < images; ++n)
        for (int p = 0; p < pixels; p += run) {
            const int count = smaller(run, pixels - p);
            for (int e = 0; 8 * e < count; ++e)
                find_places(places + e, planes, p + 8 * e, pixels, out_width, stride);
            for (int k = first; k < last; k += PANEL)
                pack_pixels((float *)(panels + (k - first) / PANEL * SIDES * DEPTH),
                            images_x + (long)n * channels * height * width, planes, k, smaller(PANEL, last - k),
                            places, count, kernel_w, pad_h, pad_w);
            for (int o = 0; o < outputs; o += TILE_ROWS)
                for (int k = first; k < last; k += PANEL) {
                    const int valid = smaller(TILE_ROWS, outputs - o);
#define ADD_ROWS(columns, rows, sides) \
    add_tile(images_dy + ((long)n * outputs + o) * pixels + p, pixels, 1, panels + (k - first) / PANEL * SIDES * DEPTH, \
             sums + (long)o * terms + k, terms, inside, count, columns, valid, rows, sides)
                    if (last - k >= PANEL && valid > SHORT_ROWS) ADD_ROWS(PANEL, TILE_ROWS, SIDES);
                    else if (last - k >= PANEL) ADD_ROWS(PANEL, SHORT_ROWS, SIDES);
                    else if (last - k > TILE_LANES) ADD_ROWS(last - k, TILE_ROWS, SIDES);
                    else ADD_ROWS(last - k, TILE_ROWS, 1);
                }
        }
}

/* gradient[o][channel][tap] = sums[o][tap][channel] */
__kernel void order_terms(
    __global const float *sums, __global float *gradient, int outputs, int channels, int taps OF_GATE)
{
    GATE
    FOR_EACH(row, outputs * channels)
        for (int tap = 0; tap < taps; ++tap)
            gradient[(long)row * taps + tap] = sums[((long)(row / channels) * taps + tap) * channels + row % channels];
}

/* sums[o] = the sum of channel o of dy over pixels, then images. */
__kernel void channel_sums(__global const float *dy, __global float *sums, int images, int outputs, int pixels)
{
    FOR_EACH(o, outputs) {
        float sum = 0.0f;
        for (int n = 0; n < images; ++n) sum += sum_run(dy + ((long)n * outputs + o) * pixels, pixels);
        sums[o] = sum;
    }
}
