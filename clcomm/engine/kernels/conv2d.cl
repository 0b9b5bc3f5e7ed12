/* Convolution of x[N,C,H,W] with weight[O,C,kernel_h,kernel_w] to y[N,O,out_h,out_w], and its gradients.

   `convolve` serves the result and the data gradient, which is the convolution of dy with the kernel turned round:
       y[n,o,oy,ox] = bias[o] + sum over c,i,j of x[n,c,iy,ix] * weight[first + o*w_o + c*w_c + i*w_i + j*w_j]
   where iy = (oy*stride + i - pad_h) / dilation, and terms outside x, or between its rows and columns when dilation
   is the forward pass's stride, are left out rather than multiplied by zero. */

#define SHAPE_ARGS \
    int images, int channels, int height, int width, int outputs, int out_height, int out_width, int kernel_h, \
    int kernel_w, int stride, int dilation, int pad_h, int pad_w, int w_first, int w_o, int w_c, int w_i, int w_j, \
    int has_bias

#ifdef ON_CPU

/* Eight images share a vector, one in each lane: x is first packed to [N/8][C][H][W] of float8. Borders, strides and
   kernel sizes then concern whole vectors, every load is aligned, and no width leaves lanes idle. Lanes past the last
   image hold zeros.

   Sums are kept for tiles of 4 outputs x 3 pixels: 12 vectors, which with their operands fill 16 registers.

   Builds: one takes every size at run time; the other is for one WIDTH (of x and y alike, stride 1) and one
   KERNEL_W and PAD_W, so that the taps which fall outside x at either end of a row are known when it is compiled. With
   ONE_CHANNEL in x that build also knows KERNEL_H, and keeps a tile's weights in local memory in the order of their
   use: there the loop over channels does not outweigh the addresses of the weights. */

#define TILE_OUTPUTS 4
#define TILE_PIXELS 3
#ifdef WIDTH
#define SEGMENT (WIDTH + TILE_PIXELS)
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

#define SHAPE \
    {images, channels, height, width, outputs, out_height, out_width, kernel_h, kernel_w, stride, dilation, pad_h, \
     pad_w, w_first, w_o, w_c, w_i, w_j, has_bias}

typedef struct {
    int images, channels, height, width, outputs, out_height, out_width, kernel_h, kernel_w, stride, dilation, pad_h;
    int pad_w, w_first, w_o, w_c, w_i, w_j, has_bias;
} Shape;

/* Returns pixel `p` of 8 images, image rows `stride` apart; lanes from `valid` on are zero. */
INLINE float8 gather_lanes(__global const float *x, long stride, int valid)
{
    float8 value = 0.0f;
    for (int i = 0; i < valid; ++i) ((float *)&value)[i] = x[i * stride];
    return value;
}

/* Returns in `rows` the lanes of the 8 pixels from x on. */
INLINE void gather_block(float8 rows[8], __global const float *x, long stride, int valid)
{
    UNROLL for (int i = 0; i < 8; ++i) rows[i] = i < valid ? load8(x + i * stride) : (float8)0.0f;
    transpose8(rows);
}

__kernel void pack_lanes(__global const float *x, __global float8 *packed, int images, int features, int run)
{
    const int block = get_global_id(1), first = get_global_id(0) * run, last = smaller(first + run, features);
    const int valid = smaller(8, images - block * 8);
    x += (long)block * 8 * features;
    packed += (long)block * features;
    int f = first;
    for (; f + 8 <= last; f += 8) {
        float8 rows[8];
        gather_block(rows, x + f, features, valid);
        UNROLL for (int i = 0; i < 8; ++i) packed[f + i] = rows[i];
    }
    for (; f < last; ++f) packed[f] = gather_lanes(x + f, features, valid);
}

/* Packs a gradient and adds up each channel's pixels: bias_partial[N/8][outputs], lanes not yet added. */
__kernel void pack_gradient(
    __global const float *grad, __global float8 *packed, __global float8 *bias_partial, int images, int outputs,
    int plane)
{
    const int o = get_global_id(0), block = get_global_id(1), valid = smaller(8, images - block * 8);
    const long stride = (long)outputs * plane;
    grad += block * 8 * stride + (long)o * plane;
    packed += ((long)block * outputs + o) * plane;
    float8 sum[2] = {0.0f, 0.0f};
    int p = 0;
    for (; p + 8 <= plane; p += 8) {
        float8 rows[8];
        gather_block(rows, grad + p, stride, valid);
        UNROLL for (int i = 0; i < 8; ++i) {
            packed[p + i] = rows[i];
            sum[i & 1] += rows[i];
        }
    }
    for (; p < plane; ++p) {
        packed[p] = gather_lanes(grad + p, stride, valid);
        sum[0] += packed[p];
    }
    bias_partial[block * outputs + o] = sum[0] + sum[1];
}

/* Stores `count` pixels of 8 images from lanes to rows `stride` apart. */
INLINE void unpack_lanes(__local const float8 *packed, __global float *to, long stride, int count, int valid)
{
    int p = 0;
    for (; p + 8 <= count; p += 8) {
        float8 rows[8];
        UNROLL for (int i = 0; i < 8; ++i) rows[i] = packed[p + i];
        transpose8(rows);
        UNROLL for (int i = 0; i < 8; ++i) if (i < valid) store8(rows[i], to + i * stride + p);
    }
    for (; p < count; ++p)
        for (int i = 0; i < valid; ++i) to[i * stride + p] = ((__local const float *)(packed + p))[i];
}

/* Stores the whole groups of 8 among `filled` waiting pixels, all of them at the end; returns how many stay. */
INLINE int flush(__local float8 *waiting, __global float *to, long stride, int filled, int is_last, int valid)
{
    const int whole = is_last ? filled : filled & ~7;
    unpack_lanes(waiting, to, stride, whole, valid);
    for (int p = whole; p < filled; ++p) waiting[p - whole] = waiting[p];
    return filled - whole;
}

/* The index whose `dilation`-fold is `scaled`, or -1 where there is none. */
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
    float8 sum[TILE_OUTPUTS][TILE_PIXELS], __global const float8 *x, const int offset[TILE_PIXELS], int plane,
    WEIGHTS weight, const int w_output[TILE_OUTPUTS], int w_channel, int channels, const int mask)
{
    for (int c = 0; c < channels; ++c) {
        float8 value[TILE_PIXELS];
        UNROLL for (int p = 0; p < TILE_PIXELS; ++p) if (mask >> p & 1) value[p] = x[offset[p]];
        UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o) {
            const float factor = weight[W_OUTPUT(o)];
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) if (mask >> p & 1) sum[o][p] += factor * value[p];
        }
        x += plane;
        weight += w_channel;
    }
}

/* Computes the tile at (oy, ox) and puts it down in rows of `results`, `results_row` apart. */
INLINE void convolve_tile(
    __local float8 *results, int results_row, __global const float8 *packed, WEIGHTS weight,
    const int w_output[TILE_OUTPUTS], const float8 start[TILE_OUTPUTS], Shape s, int oy, int ox,
    const int is_left, const int is_right)
{
    float8 sum[TILE_OUTPUTS][TILE_PIXELS];
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i)
        UNROLL for (int p = 0; p < TILE_PIXELS; ++p) sum[i][p] = start[i];
    for (int i = 0; i < s.kernel_h; ++i) {
        const int iy = undilated(oy * s.stride + i - s.pad_h, s.dilation);
        if (iy < 0 || iy >= s.height) continue;
        __global const float8 *row = packed + iy * s.width;
        WEIGHTS tap = weight + i * W_I(s);
#define ADD_TAP(mask) \
    add_tap(sum, row, offset, s.height * s.width, tap + j * W_J(s), w_output, s.w_c, CHANNELS(s), mask)
#ifdef WIDTH
        UNROLL for (int j = 0; j < KERNEL_W; ++j) {
            int offset[TILE_PIXELS], mask = 0;
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) {
                offset[p] = ox + p + j - PAD_W;
                const int is_out = (is_left && p + j < PAD_W)
                    || (is_right && (p > (WIDTH - 1) % TILE_PIXELS || p + j - PAD_W > (WIDTH - 1) % TILE_PIXELS));
                mask |= !is_out << p;
            }
            ADD_TAP(mask);
        }
#else
        for (int j = 0; j < s.kernel_w; ++j) {
            int offset[TILE_PIXELS], mask = 0;
            UNROLL for (int p = 0; p < TILE_PIXELS; ++p) {
                offset[p] = undilated((ox + p) * s.stride + j - s.pad_w, s.dilation);
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
    __local float8 *results, int results_row, __global const float8 *packed, WEIGHTS weight,
    const int w_output[TILE_OUTPUTS], const float8 start[TILE_OUTPUTS], Shape s, int oy, int first, int last)
{
#define TILE(ox, is_left, is_right) \
    convolve_tile(results + (ox) - first, results_row, packed, weight, w_output, start, s, oy, ox, is_left, is_right)
#ifdef WIDTH
    TILE(0, 1, 0);
    for (int ox = TILE_PIXELS; ox + TILE_PIXELS < WIDTH; ox += TILE_PIXELS) TILE(ox, 0, 0);
    TILE((WIDTH - 1) / TILE_PIXELS * TILE_PIXELS, 0, 1);
#else
    for (int ox = first; ox < last; ox += TILE_PIXELS) TILE(ox, 0, 0);
#endif
}

/* Where a work-item's 4 outputs take their weights, and the sums they start from. */
INLINE void outputs_start(
    int w_output[TILE_OUTPUTS], float8 start[TILE_OUTPUTS], __global const float *bias, Shape s, int o)
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

__kernel void convolve(
    __global const float8 *packed, __global const float *weight, __global const float *bias, __global float *y,
    SHAPE_ARGS)
{
    /* Results wait here until there are vectors of 8 pixels to store for each image. */
    __local float8 waiting[TILE_OUTPUTS][8 + SEGMENT];
    NEAR_WEIGHTS(near);
    const Shape s = SHAPE;
    const int o = get_global_id(0) * TILE_OUTPUTS, block = get_global_id(1);
    const int outputs_valid = smaller(TILE_OUTPUTS, outputs - o), images_valid = smaller(8, images - block * 8);
    const int out_plane = out_height * out_width;
    const long image_stride = (long)outputs * out_plane;
    int w_output[TILE_OUTPUTS];
    float8 start[TILE_OUTPUTS];
    outputs_start(w_output, start, bias, s, o);
    FETCH_WEIGHTS(near, weight);
    packed += (long)block * channels * height * width;
    y += block * 8 * image_stride + (long)o * out_plane;
    int filled = 0;
    for (int oy = 0; oy < out_height; ++oy)
        for (int first = 0; first < out_width; first += SEGMENT) {
            const int last = smaller(first + SEGMENT, out_width), is_last = oy == out_height - 1 && last == out_width;
            convolve_segment(
                &waiting[0][filled], 8 + SEGMENT, packed, near, w_output, start, s, oy, first, last);
            filled += last - first;
            const int stored = oy * out_width + last - filled;
            int left = 0;
            for (int i = 0; i < outputs_valid; ++i)
                left = flush(waiting[i], y + (long)i * out_plane + stored, image_stride, filled, is_last, images_valid);
            filled = left;
        }
}

#ifdef WIDTH

#define POOLED (WIDTH / 2)
#define MASKED 4

/* The maximum of 4 vectors after ReLU; `place` says which it was, the first of equals, or MASKED where ReLU gave 0.
   NaN is larger than all, as in PyTorch. */
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

/* As `convolve`, then ReLU and the maximum of each 2 x 2 pixels, while the rows are in the nearest cache.
   y[N,O,H/2,W/2]; places[N/8][O][H/2][W/2] of 8 lanes serve `unpool_lanes`. */
__kernel void convolve_relu_pool(
    __global const float8 *packed, __global const float *weight, __global const float *bias, __global float *y,
    __global uchar8 *places, SHAPE_ARGS)
{
    __local float8 rows[TILE_OUTPUTS][2][SEGMENT], waiting[TILE_OUTPUTS][8 + POOLED];
    NEAR_WEIGHTS(near);
    const Shape s = SHAPE;
    const int o = get_global_id(0) * TILE_OUTPUTS, block = get_global_id(1);
    const int outputs_valid = smaller(TILE_OUTPUTS, outputs - o), images_valid = smaller(8, images - block * 8);
    const int pooled_height = out_height / 2, pooled_plane = pooled_height * POOLED;
    const long image_stride = (long)outputs * pooled_plane;
    int w_output[TILE_OUTPUTS];
    float8 start[TILE_OUTPUTS];
    outputs_start(w_output, start, bias, s, o);
    FETCH_WEIGHTS(near, weight);
    packed += (long)block * channels * height * width;
    y += block * 8 * image_stride + (long)o * pooled_plane;
    places += ((long)block * outputs + o) * pooled_plane;
    int filled = 0;
    for (int py = 0; py < pooled_height; ++py) {
        for (int r = 0; r < 2; ++r)
            convolve_segment(&rows[0][r][0], 2 * SEGMENT, packed, near, w_output, start, s, 2 * py + r, 0, WIDTH);
        int left = 0;
        for (int i = 0; i < outputs_valid; ++i) {
            for (int px = 0; px < POOLED; ++px) {
                const float8 values[4] = {
                    rows[i][0][2 * px], rows[i][0][2 * px + 1], rows[i][1][2 * px], rows[i][1][2 * px + 1]};
                int8 place;
                waiting[i][filled + px] = pool_lanes(values, &place);
                places[i * pooled_plane + py * POOLED + px] = convert_uchar8(place);
            }
            const int stored = py * POOLED - filled;
            left = flush(waiting[i], y + (long)i * pooled_plane + stored, image_stride, filled + POOLED,
                         py == pooled_height - 1, images_valid);
        }
        filled = left;
    }
}

/* Turns the gradient of `convolve_relu_pool`'s result to that of the convolution's result, packed, and adds up each
   channel: bias_partial[N/8][outputs], lanes not yet added. */
__kernel void unpool_lanes(
    __global const float *grad, __global const uchar8 *places, __global float8 *packed, __global float8 *bias_partial,
    int images, int outputs, int out_height)
{
    const int o = get_global_id(0), block = get_global_id(1), valid = smaller(8, images - block * 8);
    const int pooled_height = out_height / 2, pooled_plane = pooled_height * POOLED;
    const long stride = (long)outputs * pooled_plane;
    grad += block * 8 * stride + (long)o * pooled_plane;
    places += ((long)block * outputs + o) * pooled_plane;
    packed += ((long)block * outputs + o) * out_height * WIDTH;
    const float8 zero = 0.0f;
    float8 sum = zero;
    for (int first = 0; first < pooled_plane; first += 8) {
        float8 values[8];
        const int count = smaller(8, pooled_plane - first);
        if (count == 8) gather_block(values, grad + first, stride, valid);
        else for (int p = 0; p < count; ++p) values[p] = gather_lanes(grad + first + p, stride, valid);
        for (int p = 0; p < count; ++p) {
            const int8 place = convert_int8(places[first + p]);
            __global float8 *to = packed + (first + p) / POOLED * 2 * WIDTH + (first + p) % POOLED * 2;
            to[0] = place == 0 ? values[p] : zero;
            to[1] = place == 1 ? values[p] : zero;
            to[WIDTH] = place == 2 ? values[p] : zero;
            to[WIDTH + 1] = place == 3 ? values[p] : zero;
            sum += place == MASKED ? zero : values[p];
        }
    }
    /* The last row and column of odd sizes took no part in the pooling. */
    if (WIDTH % 2) for (int row = 0; row < out_height; ++row) packed[(row + 1) * WIDTH - 1] = zero;
    if (out_height % 2) for (int p = 0; p < WIDTH; ++p) packed[(out_height - 1) * WIDTH + p] = zero;
    bias_partial[block * outputs + o] = sum;
}

#endif

/* Rows' share of the weight gradient of 4 outputs and of the columns in `mask`. */
INLINE void add_rows(
    float8 sum[TILE_OUTPUTS][TILE_PIXELS], __global const float8 *grad, const int g_offset[TILE_OUTPUTS],
    int grad_row, __global const float8 *x, const int x_offset[TILE_PIXELS], int x_row, int rows, int count, int stride,
    const int mask)
{
    if (count == grad_row && count * stride == x_row) {
        count *= rows;
        rows = 1;
    }
    for (int row = 0; row < rows; ++row) {
        __global const float8 *g = grad + row * grad_row, *from = x + row * x_row;
        for (int p = 0; p < count; ++p) {
            float8 value[TILE_PIXELS];
            UNROLL for (int c = 0; c < TILE_PIXELS; ++c) if (mask >> c & 1) value[c] = from[x_offset[c]];
            UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o) {
                const float8 factor = g[g_offset[o]];
                UNROLL for (int c = 0; c < TILE_PIXELS; ++c) if (mask >> c & 1) sum[o][c] += factor * value[c];
            }
            ++g;
            from += stride;
        }
    }
}

/* Which of the rows iy, iy + step, iy + 2*step lie inside x, among those in `columns`. */
INLINE int rows_inside(int iy, int step, int height, int columns)
{
    int mask = 0;
    UNROLL for (int c = 0; c < TILE_PIXELS; ++c) mask |= (iy + c * step >= 0 && iy + c * step < height) << c;
    return mask & columns;
}

/* partial[chunk][O][C][kernel_h * kernel_w]: the weight gradient of a chunk of image blocks, lanes not yet added.
   A chunk is a fixed number of images, so the order of all sums is the same on any number of cores. The columns of a
   tile are three channels at one tap; with one channel they are three rows of the kernel. */
__kernel void weight_gradient(
    __global const float8 *packed, __global const float8 *packed_grad, __global float8 *partial,
    int blocks, int blocks_each, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int pad_h, int pad_w, int rows_each)
{
    const int o = get_global_id(0) * TILE_OUTPUTS, chunk = get_global_id(1);
    const int outputs_valid = smaller(TILE_OUTPUTS, outputs - o);
    const int plane = height * width, out_plane = out_height * out_width, taps = kernel_h * kernel_w;
    const int by_channel = channels > 1, columns = by_channel ? channels : kernel_h;
    const int column_x = by_channel ? plane : width, column_partial = by_channel ? taps : kernel_w;
    int g_offset[TILE_OUTPUTS], x_offset[TILE_PIXELS];
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i) g_offset[i] = smaller(i, outputs_valid - 1) * out_plane;
    UNROLL for (int c = 0; c < TILE_PIXELS; ++c) x_offset[c] = c * column_x;
    partial += ((long)chunk * outputs + o) * channels * taps;
    const int first_block = chunk * blocks_each, last_block = smaller(first_block + blocks_each, blocks);
    for (int block = first_block; block < last_block; ++block)
        for (int first_row = 0; first_row < out_height; first_row += rows_each)
            for (int column = 0, columns_valid; column < columns; column += columns_valid) {
                /* Four columns left are two tiles of two: one alone has too few sums to fill the pipeline. */
                columns_valid = columns - column == 4 ? 2 : smaller(TILE_PIXELS, columns - column);
                for (int tap = 0; tap < (by_channel ? taps : kernel_w); ++tap) {
                    const int is_start = block == first_block && first_row == 0;
                    const int i = by_channel ? tap / kernel_w : column, j = tap % kernel_w;
                    __global float8 *to = partial + column * column_partial + tap;
                    float8 sum[TILE_OUTPUTS][TILE_PIXELS];
                    UNROLL for (int a = 0; a < TILE_OUTPUTS; ++a)
                        UNROLL for (int c = 0; c < TILE_PIXELS; ++c)
                            sum[a][c] = is_start || a >= outputs_valid || c >= columns_valid
                                ? (float8)0.0f : to[a * channels * taps + c * column_partial];
                    /* The pixels whose ix = ox*stride + j - pad_w lies inside x. */
                    const int first = larger(0, (pad_w - j + stride - 1) / stride);
                    const int last = smaller(out_width, (width - 1 + pad_w - j + stride) / stride);
                    __global const float8 *grad = packed_grad + ((long)block * outputs + o) * out_plane + first;
                    __global const float8 *x = packed + ((long)block * channels + (by_channel ? column : 0)) * plane
                        + first * stride + j - pad_w;
                    const int end = smaller(first_row + rows_each, out_height);
                    for (int oy = first_row, next; oy < end; oy = next) {
                        const int iy = oy * stride + i - pad_h, step = by_channel ? 0 : 1;
                        const int mask = rows_inside(iy, step, height, (1 << columns_valid) - 1);
                        for (next = oy + 1; next < end; ++next)
                            if (rows_inside(next * stride + i - pad_h, step, height, (1 << columns_valid) - 1) != mask) break;
#define ADD_ROWS(mask) \
    add_rows(sum, grad + oy * out_width, g_offset, out_width, x + iy * width, x_offset, stride * width, next - oy, \
             last - first, stride, mask)
                        switch (mask) {
                            case 1: ADD_ROWS(1); break;
                            case 2: ADD_ROWS(2); break;
                            case 3: ADD_ROWS(3); break;
                            case 4: ADD_ROWS(4); break;
                            case 6: ADD_ROWS(6); break;
                            case 7: ADD_ROWS(7); break;
                        }
                    }
                    UNROLL for (int a = 0; a < TILE_OUTPUTS; ++a)
                        UNROLL for (int c = 0; c < TILE_PIXELS; ++c)
                            if (a < outputs_valid && c < columns_valid)
                                to[a * channels * taps + c * column_partial] = sum[a][c];
                }
            }
}

/* sums[i] = the sum of partial[chunk][i] over chunks, then lanes. */
__kernel void add_partials(__global const float8 *partial, __global float *sums, int count, int chunks)
{
    FOR_EACH(i, count) {
        float8 sum = partial[i];
        for (int chunk = 1; chunk < chunks; ++chunk) sum += partial[(long)chunk * count + i];
        sums[i] = lanes_sum(sum);
    }
}

#else

/* Elsewhere tensors stay N C H W: a work-item computes OUTPUTS sums at one pixel, so neighbouring items read
   neighbouring pixels, and the work-group keeps the weights it needs in local memory. */

#define OUTPUTS 8
#define TAPS 64

__kernel void convolve(
    __global const float *x, __global const float *weight, __global const float *bias, __global float *y,
    SHAPE_ARGS)
{
    __local float factors[TAPS][OUTPUTS];
    const int out_plane = out_height * out_width, taps = kernel_h * kernel_w, depth = channels * taps;
    const int pixel = get_global_id(0), o = get_group_id(1) * OUTPUTS;
    const int image = pixel / out_plane, oy = pixel % out_plane / out_width, ox = pixel % out_width;
    const int is_inside = image < images;
    x += (long)image * channels * height * width;
    float sum[OUTPUTS];
    UNROLL for (int i = 0; i < OUTPUTS; ++i) sum[i] = has_bias && o + i < outputs ? bias[o + i] : 0.0f;
    for (int first = 0; first < depth; first += TAPS) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = get_local_id(0); k < TAPS * OUTPUTS; k += get_local_size(0)) {
            const int tap = first + k / OUTPUTS, output = o + k % OUTPUTS;
            if (tap < depth && output < outputs)
                factors[k / OUTPUTS][k % OUTPUTS] = weight[w_first + output * w_o + tap / taps * w_c
                                                           + tap % taps / kernel_w * w_i + tap % kernel_w * w_j];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = first; is_inside && k < min(first + TAPS, depth); ++k) {
            const int y_scaled = oy * stride + k % taps / kernel_w - pad_h, iy = y_scaled / dilation;
            const int x_scaled = ox * stride + k % kernel_w - pad_w, ix = x_scaled / dilation;
            if (y_scaled < 0 || iy >= height || iy * dilation != y_scaled) continue;
            if (x_scaled < 0 || ix >= width || ix * dilation != x_scaled) continue;
            const float value = x[((long)(k / taps) * height + iy) * width + ix];
            UNROLL for (int i = 0; i < OUTPUTS; ++i) sum[i] += factors[k - first][i] * value;
        }
    }
    for (int i = 0; is_inside && i < OUTPUTS && o + i < outputs; ++i)
        y[((long)image * outputs + o + i) * out_plane + pixel % out_plane] = sum[i];
}

/* A work-group adds up one tap of one channel for OUTPUTS outputs. */
__kernel void weight_gradient(
    __global const float *x, __global const float *grad, __global float *weight,
    int images, int channels, int height, int width, int outputs, int out_height, int out_width,
    int kernel_h, int kernel_w, int stride, int pad_h, int pad_w)
{
    GROUP_SCRATCH(scratch);
    const int out_plane = out_height * out_width, taps = kernel_h * kernel_w;
    const int column = get_group_id(0), o = get_group_id(1) * OUTPUTS;
    const int c = column / taps, i = column % taps / kernel_w, j = column % kernel_w;
    float sum[OUTPUTS];
    UNROLL for (int k = 0; k < OUTPUTS; ++k) sum[k] = 0.0f;
    FOR_COLUMNS(pixel, images * out_plane) {
        const int image = pixel / out_plane, place = pixel % out_plane;
        const int iy = place / out_width * stride + i - pad_h, ix = place % out_width * stride + j - pad_w;
        if (iy < 0 || iy >= height || ix < 0 || ix >= width) continue;
        const float value = x[(((long)image * channels + c) * height + iy) * width + ix];
        UNROLL for (int k = 0; k < OUTPUTS; ++k)
            if (o + k < outputs) sum[k] += grad[((long)image * outputs + o + k) * out_plane + place] * value;
    }
    for (int k = 0; k < OUTPUTS; ++k) {
        const float total = GROUP_SUM(sum[k], scratch);
        if (GROUP_LEADER && o + k < outputs) weight[((long)(o + k) * channels + c) * taps + column % taps] = total;
    }
}

/* bias[o] = the sum of grad[n, o, :] over images and pixels. */
__kernel void bias_gradient(__global const float *grad, __global float *bias, int images, int outputs, int plane)
{
    GROUP_SCRATCH(scratch);
    const int o = get_group_id(0);
    float sum = 0.0f;
    FOR_COLUMNS(i, images * plane) sum += grad[((long)(i / plane) * outputs + o) * plane + i % plane];
    const float total = GROUP_SUM(sum, scratch);
    if (GROUP_LEADER) bias[o] = total;
}

#endif
