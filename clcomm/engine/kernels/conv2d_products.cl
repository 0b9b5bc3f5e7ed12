/* Convolutions on CPUs as matrix products, with pixels in the lanes:
       y[n,o,oy,ox] = bias[o] + sum over i,j,c of weight[o,c,i,j] * x[n,c,iy,ix]
   where iy = oy*stride + i + shift_h, likewise ix. They need no images to fill their vectors and read many channels in
   order, where conv2d.cl needs blocks of 8 images and few channels. A term of the sum is a tap of the kernel and a
   channel: term = (i*kernel_w + j)*channels + c.

   A work-item takes PANELS panels of PANEL pixels. It copies what DEPTH terms read into the panels, and adds the products
   with tiles of TILE_ROWS outputs, whose weights lie in the order of their use. Each sum has a lane of its own, so that
   no size of a tile or panel changes a bit. Pixels outside x are zeros in the panels. Where a weight is infinite or NaN
   that would be wrong: then each tap is added by itself, and lanes outside x keep their old sums.

   With GATED it computes only what conv2d_winograd.cl could not: nothing if all of that file's flags are set.

   The data gradient is the convolution of dy with the reversed kernel. With a stride, pixels of dx whose rows and
   columns leave the same remainders see the same taps: each such phase is a convolution with a part of the kernel, and
   `join_phases` puts them together. */

#define SIDES (PANEL / TILE_LANES)
#define EIGHTS (PANEL / 8)
#define SHORT_ROWS (TILE_ROWS < 4 ? TILE_ROWS : 4) /* of a last tile that has no more */
#define UNROLL_4 _Pragma("unroll 4")
/* Channels between the weights that are packed and those that are asked for: time for several reads from memory. */
#define AHEAD 8
#if defined(__x86_64__) || defined(__aarch64__)
#define ASK_FOR(address) __builtin_prefetch(address)
#else
#define ASK_FOR(address)
#endif

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

/* Packs what a tap sees of eight pixels in `count` channels. */
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

/* Packs what `columns` terms from `first` on read for `count` pixels at `places`. */
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
   dy with what the terms read, in runs of `run` pixels. */
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
