/* Convolutions on CPUs as sums of matrix products, one for each tap of the kernel, with pixels in the lanes:
       y[n,o,oy,ox] = bias[o] + sum over i,j of (sum over c of weight[o,c,i,j] * x[n,c,iy,ix])
   where iy = oy*stride + (i + shift_h) / dilation, likewise ix. It needs no images to fill its vectors and reads many
   channels in order, where conv2d.cl needs blocks of 8 images and few channels.

   A work-item takes PANELS panels of PANEL pixels. For each tap it copies the pixels that the tap sees into the panels,
   DEPTH channels at a time, and adds the products with tiles of TILE_ROWS outputs, whose weights lie in the order of
   their use. Pixels outside x are left out: their lanes keep the old sums. Each sum has a lane of its own, so that no
   size of a tile or panel changes a bit.

   The data gradient is the convolution of dy with the reversed kernel. With a stride, pixels of dx whose rows and
   columns leave the same remainders see the same taps: each such phase is a convolution with a dilation, and
   `join_phases` puts them together. */

#define SIDES (PANEL / TILE_LANES)
#define EIGHTS (PANEL / 8)

typedef struct {
    int channels, height, width;
} Planes;

/* Where a tap sees eight pixels of a plane: `at` is 0 where it is outside. */
typedef struct {
    int8 at, inside;
    int is_run; /* all eight follow one another */
} Eight;

/* The pixels that follow `first` in rows of `width`, times `stride`, plus the shifts; from `count` on none is inside. */
INLINE Eight seen_pixels(Planes x, int first, int count, int width, int stride, int shift_h, int shift_w)
{
    const int8 place = (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    int8 row = first / width, column = place + first % width;
    for (int left = 7; left > 0; left -= width) {
        const int8 wraps = column >= width;
        row -= wraps;
        column = wraps ? column - width : column;
    }
    const int8 iy = row * stride + shift_h, ix = column * stride + shift_w;
    Eight seen;
    seen.inside = (iy >= 0) & (iy < x.height) & (ix >= 0) & (ix < x.width) & (place + first < count);
    const int start = iy.s0 * x.width + ix.s0;
    seen.is_run = stride == 1 && width == x.width && start >= 0 && start + 8 <= x.height * x.width;
    seen.at = seen.is_run ? place + start : seen.inside ? iy * x.width + ix : 0;
    return seen;
}

INLINE float8 eight_of(__global const float *plane, const Eight *seen)
{
    const float8 zero = 0.0f;
    float8 value;
    if (seen->is_run) value = load8(plane + seen->at.s0);
    else UNROLL for (int i = 0; i < 8; ++i) ((float *)&value)[i] = plane[((const int *)&seen->at)[i]];
    return seen->inside ? value : zero;
}

/* Adds the products of a tile of A with `depth` rows of a panel to `valid` rows of c, in lanes that are inside. */
INLINE void add_tile(
    __global const float *a, const long a_row, const long a_column, const vector *panel, __global float *c, long c_row,
    const vector_mask *inside, int depth, int columns, int valid, const int sides)
{
    vector sum[TILE_ROWS][SIDES];
    long row[TILE_ROWS];
    UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
        UNROLL for (int side = 0; side < SIDES; ++side) sum[r][side] = 0.0f;
        row[r] = a_row == 1 ? r : smaller(r, valid - 1) * a_row;
    }
    for (int k = 0; k < depth; ++k) {
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
            const float value = a[row[r]];
            UNROLL for (int side = 0; side < SIDES; ++side)
                if (side < sides) sum[r][side] += value * panel[SIDES * k + side];
        }
        a += a_column;
    }
    UNROLL for (int side = 0; side < SIDES; ++side) if (side < sides)
        UNROLL for (int r = 0; r < TILE_ROWS; ++r) if (r < valid) {
            __global float *to = c + r * c_row + TILE_LANES * side;
            const int count = columns - TILE_LANES * side;
            const vector old = load_vector(to, count);
            store_vector(inside[side] ? old + sum[r][side] : old, to, count);
        }
}

/* packed[taps][rows / TILE_ROWS][depth][TILE_ROWS] = weight[row * w_row + k * w_depth + tap], taps reversed or not. */
__kernel void pack_weights(
    __global const float *weight, __global float *packed, int rows, int depth, int taps, int w_row, int w_depth,
    int is_reversed)
{
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    FOR_EACH(tile, tiles)
        for (int k = 0; k < depth; ++k)
            for (int tap = 0; tap < taps; ++tap) {
                __global float *to = packed + (((long)tap * tiles + tile) * depth + k) * TILE_ROWS;
                __global const float *from = weight + (long)k * w_depth + (is_reversed ? taps - 1 - tap : tap);
                UNROLL for (int r = 0; r < TILE_ROWS; ++r)
                    to[r] = from[(long)smaller(tile * TILE_ROWS + r, rows - 1) * w_row];
            }
}

__kernel void convolve_products(
    __global const float *images_x, __global const float *packed, __global const float *bias, __global float *images_y,
    int first_y, int channels, int height, int width, int outputs, int out_height, int out_width, int kernel_h,
    int kernel_w, int stride, int dilation, int shift_h, int shift_w, int has_bias)
{
    vector panels[PANELS * SIDES * DEPTH];
    vector_mask inside[PANELS * SIDES];
    Eight seen[PANELS * EIGHTS];
    const Planes planes = {channels, height, width};
    const int pixels = out_height * out_width, first = get_global_id(0) * PANELS * PANEL;
    const int last = smaller(first + PANELS * PANEL, pixels), tiles = (outputs + TILE_ROWS - 1) / TILE_ROWS;
    __global const float *x = images_x + (long)get_global_id(1) * channels * height * width;
    __global float *y = images_y + first_y + (long)get_global_id(1) * outputs * pixels;
    for (int o = 0; o < outputs; ++o) {
        const float start = has_bias ? bias[o] : 0.0f;
        for (int p = first; p < last; ++p) y[(long)o * pixels + p] = start;
    }
    for (int i = 0; i < kernel_h; ++i)
        for (int j = 0; j < kernel_w; ++j) {
            if ((i + shift_h) % dilation || (j + shift_w) % dilation) continue;
            for (int e = 0; first + 8 * e < last; ++e) {
                seen[e] = seen_pixels(planes, first + 8 * e, last, out_width, stride, (i + shift_h) / dilation,
                                      (j + shift_w) / dilation);
                ((int8 *)inside)[e] = seen[e].inside;
            }
            for (int k = 0; k < channels; k += DEPTH) {
                const int run = smaller(DEPTH, channels - k);
                for (int e = 0; first + 8 * e < last; ++e) {
                    float *to = (float *)(panels + e / EIGHTS * SIDES * DEPTH) + e % EIGHTS * 8;
                    for (int c = 0; c < run; ++c)
                        *(float8 *)(to + c * PANEL) = eight_of(x + (long)(k + c) * height * width, seen + e);
                }
                for (int t = 0; t < tiles; ++t)
                    for (int g = 0, p = first; p < last; ++g, p += PANEL) {
                        const int valid = smaller(TILE_ROWS, outputs - t * TILE_ROWS);
#define ADD_TILE(columns, sides) \
    add_tile(packed + (((long)(i * kernel_w + j) * tiles + t) * channels + k) * TILE_ROWS, 1, TILE_ROWS, \
             panels + g * SIDES * DEPTH, y + (long)t * TILE_ROWS * pixels + p, pixels, inside + g * SIDES, run, \
             columns, valid, sides)
                        if (last - p >= PANEL) ADD_TILE(PANEL, SIDES);
                        else if (last - p > TILE_LANES) ADD_TILE(last - p, SIDES);
                        else ADD_TILE(last - p, 1);
                    }
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

/* Packs pixels [first, first + count) of `columns` channels from `channel` on, as a tap sees them. */
INLINE void pack_pixels(
    float *to, __global const float *x, Planes planes, int channel, int columns, int first, int count, int pixels,
    int out_width, int stride, int shift_h, int shift_w)
{
    for (int p = 0; p < count; p += 8) {
        const Eight seen = seen_pixels(planes, first + p, pixels, out_width, stride, shift_h, shift_w);
        for (int c = 0; c < columns; c += 8) {
            float8 block[8];
            UNROLL for (int i = 0; i < 8; ++i)
                block[i] = eight_of(
                    x + (long)smaller(channel + c + i, planes.channels - 1) * planes.height * planes.width, &seen);
            transpose8(block);
            UNROLL for (int i = 0; i < 8; ++i) *(float8 *)(to + (p + i) * PANEL + c) = block[i];
        }
    }
}

/* sums[taps][O][C]: the weight gradient. A work-item takes PANELS panels, each of a tap and PANEL channels, and adds the
   products of rows of dy with the pixels that the tap sees, in runs of `run` of them. */
__kernel void weight_products(
    __global const float *images_x, __global const float *images_dy, __global float *sums, int images, int channels,
    int height, int width, int outputs, int out_height, int out_width, int kernel_h, int kernel_w, int stride,
    int pad_h, int pad_w, int run)
{
    vector panels[PANELS * SIDES * DEPTH];
    vector_mask inside[SIDES];
    const Planes planes = {channels, height, width};
    const int pixels = out_height * out_width, each = (channels + PANEL - 1) / PANEL;
    const int first = get_global_id(0) * PANELS, last = smaller(first + PANELS, each * kernel_h * kernel_w);
    UNROLL for (int side = 0; side < SIDES; ++side) inside[side] = -1;
    for (int g = first; g < last; ++g) {
        const int channel = g % each * PANEL, columns = smaller(PANEL, channels - channel);
        for (int o = 0; o < outputs; ++o)
            for (int c = 0; c < columns; ++c) sums[((long)(g / each) * outputs + o) * channels + channel + c] = 0.0f;
    }
    for (int n = 0; n < images; ++n)
        for (int p = 0; p < pixels; p += run) {
            const int count = smaller(run, pixels - p);
            for (int g = first; g < last; ++g) {
                const int tap = g / each, channel = g % each * PANEL;
                pack_pixels((float *)(panels + (g - first) * SIDES * DEPTH), images_x + (long)n * channels * height * width,
                            planes, channel, smaller(PANEL, channels - channel), p, count, pixels, out_width, stride,
                            tap / kernel_w - pad_h, tap % kernel_w - pad_w);
            }
            for (int o = 0; o < outputs; o += TILE_ROWS)
                for (int g = first; g < last; ++g) {
                    const int channel = g % each * PANEL, columns = smaller(PANEL, channels - channel);
#define ADD_ROWS(columns, sides) \
    add_tile(images_dy + ((long)n * outputs + o) * pixels + p, pixels, 1, panels + (g - first) * SIDES * DEPTH, \
             sums + ((long)(g / each) * outputs + o) * channels + channel, channels, inside, count, columns, \
             smaller(TILE_ROWS, outputs - o), sides)
                    if (columns == PANEL) ADD_ROWS(PANEL, SIDES);
                    else if (columns > TILE_LANES) ADD_ROWS(columns, SIDES);
                    else ADD_ROWS(columns, 1);
                }
        }
}

/* gradient[row][tap] = sums[tap][row] */
__kernel void order_taps(__global const float *sums, __global float *gradient, int rows, int taps)
{
    FOR_EACH(row, rows)
        for (int tap = 0; tap < taps; ++tap) gradient[(long)row * taps + tap] = sums[(long)tap * rows + row];
}

/* sums[o] = the sum of channel o of dy over pixels, then images. */
__kernel void channel_sums(__global const float *dy, __global float *sums, int images, int outputs, int pixels)
{
    FOR_EACH(o, outputs) {
        float8 lanes[2] = {0.0f, 0.0f};
        for (int n = 0; n < images; ++n) {
            __global const float *from = dy + ((long)n * outputs + o) * pixels;
            for (int p = 0; p < pixels; p += 8) lanes[p / 8 % 2] += load_lanes(from + p, pixels - p, 0.0f);
        }
        sums[o] = lanes_sum(lanes[0] + lanes[1]);
    }
}
