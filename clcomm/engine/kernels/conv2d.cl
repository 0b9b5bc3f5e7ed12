/* Convolution of x[N,C,H,W] with weight[O,C,kernel_h,kernel_w] to y[N,O,out_h,out_w] on CPUs, and its data gradient,
   which is the convolution of dy with the reversed kernel. One kernel does both:
       y[n,o,oy,ox] = bias[o] + sum over c,i,j of x[n,c,iy,ix] * weight[w_first + o*w_o + c*w_c + i*w_i + j*w_j]
   where iy = (oy*stride + i*apart_h - pad_h) / dilation. Terms outside x, or between its rows and columns when dilation is
   the forward pass's stride, are left out rather than multiplied by zero. Taps of a dilated kernel are apart_h rows and
   apart_w columns apart. Channels and outputs are those of a group, one of `groups` that lie one after the other: a
   work-item computes outputs of one group. Without GROUPED there is one group, and taps are adjacent.

   x is packed by pack.cl, eight images to a vector: borders, strides and kernel sizes then apply to whole vectors,
   every load is aligned, and no width leaves lanes idle. Sums are kept for tiles of TILE_OUTPUTS x 3 pixels: with 4
   outputs 12 vectors, which with their operands fill 16 registers. With BLOCKS of 2 a vector of sums has 16 lanes, two
   blocks of 8 images that are packed as before, so that no sum changes. Then 8 outputs fill 32 registers. Groups of one
   output have tiles of one.

   Builds: one takes every size at run time; the other is for one WIDTH (of both x and y, stride 1, no columns between
   taps) and one KERNEL_W and PAD_W, so that the taps outside x at either end of a row are known at compile time: tiles whose taps reach
   an end of the row are compiled for their position in it, all others once. With
   ONE_CHANNEL in x that build also knows KERNEL_H, and keeps a tile's weights in local memory in the order of their
   use: without a loop over channels, computing the weights' addresses would cost more than the products. DILATED is
   defined for a dilation above 1, in the first build only. */

#define TILE_PIXELS 3
#if BLOCKS == 2
typedef float16 image_lanes;
#define KERNEL __kernel WIDE_VECTORS void
#define load_images(x, next_block) ((float16)(*(x), *((x) + (next_block))))
#else
typedef float8 image_lanes;
#define KERNEL __kernel void
#define load_images(x, next_block) (*(x))
#endif
#ifdef WIDTH
#define SEGMENT (WIDTH + TILE_PIXELS)
/* Pixels of x that a tile reads from its first one on, if the row is that long; it reads PAD_W before that. */
#define REACH (TILE_PIXELS + KERNEL_W - 1 - PAD_W)
#define LAST_TILE ((WIDTH - 1) / TILE_PIXELS * TILE_PIXELS)
#if LAST_TILE == 0 || PAD_W > TILE_PIXELS || REACH > 2 * TILE_PIXELS || REACH < TILE_PIXELS
#error "one tile sees a row's start, and two its end: see `convolve_segment`"
#endif
#else
#define SEGMENT 48
#endif
#ifdef ONE_CHANNEL
#define WEIGHTS __local const float *
#define W_OUTPUT(o) (o)
#define W_I(s) (KERNEL_W * TILE_OUTPUTS)
#define W_J(s) TILE_OUTPUTS
#define CHANNELS(s) 1
#else
#define WEIGHTS __global const float *
#define W_OUTPUT(o) w_output[o]
#define W_I(s) s.w_i
#define W_J(s) s.w_j
#define CHANNELS(s) s.channels
#endif

#ifdef GROUPED
#define SPREAD apart_h, apart_w, groups
#else
#define SPREAD 1, 1, 1
#endif
#define SHAPE_ARGS \
    int images, int channels, int height, int width, int outputs, int out_height, int out_width, int kernel_h, \
    int kernel_w, int stride, int dilation, int pad_h, int pad_w, int apart_h, int apart_w, int groups, int w_first, \
    int w_o, int w_c, int w_i, int w_j, int has_bias
#define SHAPE \
    {images, channels, height, width, outputs, out_height, out_width, kernel_h, kernel_w, stride, dilation, pad_h, \
     pad_w, SPREAD, w_first, w_o, w_c, w_i, w_j, has_bias}

typedef struct {
    int images, channels, height, width, outputs, out_height, out_width, kernel_h, kernel_w, stride, dilation, pad_h;
    int pad_w, apart_h, apart_w, groups, w_first, w_o, w_c, w_i, w_j, has_bias;
} Shape;

/* The lanes of 8 of the images of a pixel. */
INLINE float8 block_of(__local const image_lanes *pixel, int b) { return ((__local const float8 *)pixel)[b]; }

/* Stores `count` pixels of 8 images from lanes to rows `stride` apart. */
INLINE void unpack_lanes(
    __local const image_lanes *packed, int b, __global float *to, long stride, int count, int valid)
{
    int p = 0;
    for (; p + 8 <= count; p += 8) {
        float8 rows[8];
        UNROLL for (int i = 0; i < 8; ++i) rows[i] = block_of(packed + p + i, b);
        transpose8(rows);
        UNROLL for (int i = 0; i < 8; ++i) if (i < valid) store8(rows[i], to + i * stride + p);
    }
    for (; p < count; ++p)
        for (int i = 0; i < valid; ++i) to[i * stride + p] = ((__local const float *)(packed + p))[8 * b + i];
}

/* Stores the complete groups of 8 among `filled` buffered pixels, at the end all; returns how many remain. */
INLINE int flush(__local image_lanes *waiting, __global float *to, long stride, int filled, int is_last, int valid)
{
    const int whole = is_last ? filled : filled & ~7;
    for (int b = 0; b < BLOCKS && 8 * b < valid; ++b)
        unpack_lanes(waiting, b, to + 8 * b * stride, stride, whole, smaller(8, valid - 8 * b));
    for (int p = whole; p < filled; ++p) waiting[p - whole] = waiting[p];
    return filled - whole;
}

/* scaled / dilation if that is an integer, else -1. */
INLINE int undilated(int scaled, int dilation)
{
#ifdef DILATED
    return scaled >= 0 && scaled % dilation == 0 ? scaled / dilation : -1;
#else
    return scaled;
#endif
}

/* Adds one tap of the kernel, over all channels, to the pixels in `mask` of a tile. The sums stay in registers. */
INLINE void add_tap(
    image_lanes sum[TILE_OUTPUTS][TILE_PIXELS], __global const float8 *x, long next_block,
    const int offset[TILE_PIXELS], int plane, WEIGHTS weight, const int w_output[TILE_OUTPUTS], int w_channel,
    int channels, const int mask)
{
    for (int c = 0; c < channels; ++c) {
        image_lanes value[TILE_PIXELS];
        UNROLL for (int p = 0; p < TILE_PIXELS; ++p)
            if (mask >> p & 1) value[p] = load_images(x + offset[p], next_block);
        UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o) {
            const float factor = weight[W_OUTPUT(o)];
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) if (mask >> p & 1) sum[o][p] += factor * value[p];
        }
        x += plane;
        weight += w_channel;
    }
}

/* Computes the tile at (oy, ox) and stores it in rows of `results`, `results_row` apart. In the build for one WIDTH
   the taps outside pixels [ox - before, ox + after) of x are left out. */
INLINE void convolve_tile(
    __local image_lanes *results, int results_row, __global const float8 *packed, long next_block, WEIGHTS weight,
    const int w_output[TILE_OUTPUTS], const image_lanes start[TILE_OUTPUTS], Shape s, int oy, int ox,
    const int before, const int after)
{
    image_lanes sum[TILE_OUTPUTS][TILE_PIXELS];
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i)
        UNROLL for (int p = 0; p < TILE_PIXELS; ++p) sum[i][p] = start[i];
    for (int i = 0; i < s.kernel_h; ++i) {
        const int iy = undilated(oy * s.stride + i * s.apart_h - s.pad_h, s.dilation);
        if (iy < 0 || iy >= s.height) continue;
        __global const float8 *row = packed + iy * s.width;
        WEIGHTS tap = weight + i * W_I(s);
#define ADD_TAP(mask) \
    add_tap(sum, row, next_block, offset, s.height * s.width, tap + j * W_J(s), w_output, s.w_c, CHANNELS(s), mask)
#ifdef WIDTH
        UNROLL for (int j = 0; j < KERNEL_W; ++j) {
            int offset[TILE_PIXELS], mask = 0;
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) {
                const int seen = p + j - PAD_W;
                offset[p] = ox + seen;
                mask |= (p < after && seen >= -before && seen < after) << p;
            }
            ADD_TAP(mask);
        }
#else
        for (int j = 0; j < s.kernel_w; ++j) {
            int offset[TILE_PIXELS], mask = 0;
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) {
                offset[p] = undilated((ox + p) * s.stride + j * s.apart_w - s.pad_w, s.dilation);
                mask |= (ox + p < s.out_width && offset[p] >= 0 && offset[p] < s.width) << p;
            }
            switch (mask) {
                case 1: ADD_TAP(1); break;
                case 2: ADD_TAP(2); break;
                case 3: ADD_TAP(3); break;
                case 4: ADD_TAP(4); break;
                case 5: ADD_TAP(5); break;
                case 6: ADD_TAP(6); break;
                case 7: ADD_TAP(7); break;
            }
        }
#endif
    }
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i)
        UNROLL for (int p = 0; p < TILE_PIXELS; ++p) results[i * results_row + p] = sum[i][p];
}

/* Computes pixels [first, last) of row oy for 4 outputs; up to 2 places after them in `results` are overwritten. */
INLINE void convolve_segment(
    __local image_lanes *results, int results_row, __global const float8 *packed, long next_block, WEIGHTS weight,
    const int w_output[TILE_OUTPUTS], const image_lanes start[TILE_OUTPUTS], Shape s, int oy, int first, int last)
{
#define TILE(ox, before, after) \
    convolve_tile(results + (ox) - first, results_row, packed, next_block, weight, w_output, start, s, oy, ox, before, \
                  after)
#ifdef WIDTH
#define BORDER_TILE(ox) TILE(ox, ox, WIDTH - (ox))
    BORDER_TILE(0);
    for (int ox = TILE_PIXELS; ox < LAST_TILE && ox + REACH <= WIDTH; ox += TILE_PIXELS) TILE(ox, PAD_W, REACH);
#if LAST_TILE > TILE_PIXELS && LAST_TILE - TILE_PIXELS + REACH > WIDTH
    BORDER_TILE(LAST_TILE - TILE_PIXELS);
#endif
    BORDER_TILE(LAST_TILE);
#else
    for (int ox = first; ox < last; ox += TILE_PIXELS) TILE(ox, 0, 0);
#endif
}

/* The offsets of the weights of a work-item's 4 outputs, and the initial sums. */
INLINE void outputs_start(
    int w_output[TILE_OUTPUTS], image_lanes start[TILE_OUTPUTS], __global const float *bias, Shape s, int o)
{
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i) {
        const int output = smaller(o + i, s.outputs - 1);
        w_output[i] = s.w_first + output * s.w_o;
        start[i] = s.has_bias ? bias[output] : 0.0f;
    }
}

#ifdef ONE_CHANNEL
#define NEAR_WEIGHTS(near) __local float near[KERNEL_H * KERNEL_W * TILE_OUTPUTS]
#define FETCH_WEIGHTS(near, weight) \
    for (int i = 0; i < KERNEL_H; ++i) \
        for (int j = 0; j < KERNEL_W; ++j) \
            for (int t = 0; t < TILE_OUTPUTS; ++t) \
                near[(i * KERNEL_W + j) * TILE_OUTPUTS + t] = weight[w_output[t] + i * w_i + j * w_j]
#else
#define NEAR_WEIGHTS(near) __global const float *near
#define FETCH_WEIGHTS(near, weight) near = weight
#endif

KERNEL convolve(
    __global const float8 *packed, __global const float *weight, __global const float *bias, __global float *y,
    SHAPE_ARGS)
{
    /* Results are buffered here until there are vectors of 8 pixels to store for each image. */
    __local image_lanes waiting[TILE_OUTPUTS * (8 + SEGMENT)];
    NEAR_WEIGHTS(near);
    const Shape s = SHAPE;
    const int tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int group = s.groups > 1 ? get_global_id(0) / tiles : 0;
    const int o = (get_global_id(0) - group * tiles) * TILE_OUTPUTS, block = get_global_id(1) * BLOCKS;
    const int outputs_valid = smaller(TILE_OUTPUTS, outputs - o);
    const int images_valid = smaller(8 * BLOCKS, images - block * 8);
    const long next_group = (long)channels * height * width, next_block = images_valid > 8 ? s.groups * next_group : 0;
    const int out_plane = out_height * out_width;
    const long image_stride = (long)s.groups * outputs * out_plane;
    int w_output[TILE_OUTPUTS];
    image_lanes start[TILE_OUTPUTS];
    weight += (long)group * outputs * channels * kernel_h * kernel_w;
    outputs_start(w_output, start, bias + group * outputs, s, o);
    FETCH_WEIGHTS(near, weight);
    packed += ((long)block * s.groups + group) * next_group;
    y += block * 8 * image_stride + ((long)group * outputs + o) * out_plane;
    int filled = 0;
    for (int oy = 0; oy < out_height; ++oy)
        for (int first = 0; first < out_width; first += SEGMENT) {
            const int last = smaller(first + SEGMENT, out_width), is_last = oy == out_height - 1 && last == out_width;
            convolve_segment(
                waiting + filled, 8 + SEGMENT, packed, next_block, near, w_output, start, s, oy, first, last);
            filled += last - first;
            const int stored = oy * out_width + last - filled;
            int left = 0;
            for (int i = 0; i < outputs_valid; ++i)
                left = flush(waiting + i * (8 + SEGMENT), y + (long)i * out_plane + stored, image_stride, filled,
                             is_last, images_valid);
            filled = left;
        }
}

#ifdef WIDTH

#define POOLED (WIDTH / 2)
#define MASKED 4

/* The maximum of 4 vectors after ReLU; `place` is its index, the first of equals, or MASKED where ReLU gave 0. NaN is
   larger than all numbers, as in PyTorch. */
INLINE float8 pool_lanes(const float8 values[4], int8 *place)
{
    float8 best = values[0];
    *place = 0;
    UNROLL for (int k = 1; k < 4; ++k) {
        const int8 is_larger = (values[k] > best) | (values[k] != values[k]);
        best = is_larger ? values[k] : best;
        *place = is_larger ? (int8)k : *place;
    }
    const int8 is_masked = best <= 0.0f;
    *place = is_masked ? (int8)MASKED : *place;
    return is_masked ? (float8)0.0f : best;
}

/* As `convolve`, then ReLU and the maximum of each 2 x 2 pixels, while the rows are in the L1 cache.
   y[N,O,H/2,W/2]; places[N/8][O][H/2][W/2] of 8 lanes are for `unpool_lanes`. */
KERNEL convolve_relu_pool(
    __global const float8 *packed, __global const float *weight, __global const float *bias, __global float *y,
    __global uchar8 *places, SHAPE_ARGS)
{
    __local image_lanes rows[TILE_OUTPUTS * 2 * SEGMENT], waiting[TILE_OUTPUTS * (8 + POOLED)];
    NEAR_WEIGHTS(near);
    const Shape s = SHAPE;
    const int o = get_global_id(0) * TILE_OUTPUTS, block = get_global_id(1) * BLOCKS;
    const int outputs_valid = smaller(TILE_OUTPUTS, outputs - o);
    const int images_valid = smaller(8 * BLOCKS, images - block * 8);
    const long next_block = images_valid > 8 ? (long)channels * height * width : 0;
    const int pooled_height = out_height / 2, pooled_plane = pooled_height * POOLED;
    const long image_stride = (long)outputs * pooled_plane;
    int w_output[TILE_OUTPUTS];
    image_lanes start[TILE_OUTPUTS];
    outputs_start(w_output, start, bias, s, o);
    FETCH_WEIGHTS(near, weight);
    packed += (long)block * channels * height * width;
    y += block * 8 * image_stride + (long)o * pooled_plane;
    places += ((long)block * outputs + o) * pooled_plane;
    int filled = 0;
    for (int py = 0; py < pooled_height; ++py) {
        for (int r = 0; r < 2; ++r)
            convolve_segment(
                rows + r * SEGMENT, 2 * SEGMENT, packed, next_block, near, w_output, start, s, 2 * py + r, 0, WIDTH);
        int left = 0;
        for (int i = 0; i < outputs_valid; ++i) {
            __local const image_lanes *upper = rows + i * 2 * SEGMENT, *lower = upper + SEGMENT;
            __local image_lanes *own = waiting + i * (8 + POOLED);
            for (int b = 0; b < BLOCKS && 8 * b < images_valid; ++b) {
                __global uchar8 *own_places = places + ((long)b * outputs + i) * pooled_plane + py * POOLED;
                for (int px = 0; px < POOLED; ++px) {
                    const float8 values[4] = {
                        block_of(upper + 2 * px, b), block_of(upper + 2 * px + 1, b),
                        block_of(lower + 2 * px, b), block_of(lower + 2 * px + 1, b)};
                    int8 place;
                    ((__local float8 *)(own + filled + px))[b] = pool_lanes(values, &place);
                    own_places[px] = convert_uchar8(place);
                }
            }
            const int stored = py * POOLED - filled;
            left = flush(own, y + (long)i * pooled_plane + stored, image_stride, filled + POOLED,
                         py == pooled_height - 1, images_valid);
        }
        filled = left;
    }
}

#endif
