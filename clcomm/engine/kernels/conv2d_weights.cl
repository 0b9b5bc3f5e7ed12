/* The weight gradient of conv2d.cl on CPUs, from x and dy packed by pack.cl. In the POOLED build dy is that of
   `convolve_relu_pool`, and is unpooled to the convolution's pixels only where it is used, in local memory. Channels and
   outputs are those of a group, of which there are `groups`; TILE_OUTPUTS is 4, or 1 for groups of one output.
   Without GROUPED there is one group, and taps are adjacent. */

#define TILE_COLUMNS 3
/* A column is a channel, or with one channel a row of the kernel. With EACH of 2, for several channels only, a vector
   of 16 lanes holds two channels of the same 8 images: each half sums in the order of a vector of 8. */
#if EACH == 2
typedef float16 column_lanes;
#define KERNEL __kernel WIDE_VECTORS void
#define load_column(x, next_channel) ((float16)(*(x), *((x) + (next_channel))))
#define for_column(grad) ((float16)(grad, grad))
#define channel_of(value, channel) ((channel) ? (value).hi : (value).lo)
#else
typedef float8 column_lanes;
#define KERNEL __kernel void
#define load_column(x, next_channel) (*(x))
#define for_column(grad) (grad)
#define channel_of(value, channel) (value)
#endif
#ifdef POOLED
#define GRAD __local
#else
#define GRAD __global
#endif

/* Adds the contribution of rows to the weight gradient of a tile of outputs and of the columns in `mask`. */
INLINE void add_rows(
    column_lanes sum[TILE_OUTPUTS][TILE_COLUMNS], GRAD const float8 *grad, const int g_offset[TILE_OUTPUTS],
    int grad_row, __global const float8 *x, const int x_offset[TILE_COLUMNS], const int x_next[TILE_COLUMNS], int x_row,
    int rows, int count, int stride, const int mask)
{
    if (count == grad_row && count * stride == x_row) {
        count *= rows;
        rows = 1;
    }
    for (int row = 0; row < rows; ++row) {
        GRAD const float8 *g = grad + row * grad_row;
        __global const float8 *from = x + row * x_row;
        for (int p = 0; p < count; ++p) {
            column_lanes value[TILE_COLUMNS];
            UNROLL for (int c = 0; c < TILE_COLUMNS; ++c)
                if (mask >> c & 1) value[c] = load_column(from + x_offset[c], x_next[c]);
            UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o) {
                const column_lanes factor = for_column(g[g_offset[o]]);
                UNROLL for (int c = 0; c < TILE_COLUMNS; ++c) if (mask >> c & 1) sum[o][c] += factor * value[c];
            }
            ++g;
            from += stride;
        }
    }
}

/* Pixels of y from `first_inside` to before `last_inside` use a pixel inside x through the tap that is i pixels after
   the first. */
INLINE int first_inside(int i, int pad, int stride)
{
    return stride == 1 ? larger(0, pad - i) : larger(0, (pad - i + stride - 1) / stride);
}

INLINE int last_inside(int i, int pad, int stride, int size, int out_size)
{
    const int count = size + pad - i;
    return smaller(out_size, stride == 1 ? count : (count + stride - 1) / stride);
}

/* Which of the rows iy, iy + apart, iy + 2 apart lie inside x. */
INLINE int rows_inside(int iy, int apart, int height)
{
    int mask = 0;
    UNROLL for (int c = 0; c < TILE_COLUMNS; ++c) {
        const int row = iy + c * apart;
        mask |= (row >= 0 && row < height) << c;
    }
    return mask;
}

typedef struct {
    int channels, height, width, outputs, out_height, out_width, kernel_h, kernel_w, stride, pad_h, pad_w;
    int apart_h, apart_w, groups;
} Sizes;

#ifdef GROUPED
#define SPREAD apart_h, apart_w, groups
#else
#define SPREAD 1, 1, 1
#endif
#define SIZES_ARGS \
    int channels, int height, int width, int outputs, int out_height, int out_width, int kernel_h, int kernel_w, \
    int stride, int pad_h, int pad_w, int apart_h, int apart_w, int groups
#define SIZES {channels, height, width, outputs, out_height, out_width, kernel_h, kernel_w, stride, pad_h, pad_w, SPREAD}

/* Adds to `partial` the contribution of rows [first_row, end_row) of a block's dy to a tile of outputs, through the tap
   i rows and j columns after the first, and to `columns` columns: each is EACH channels, `valid` in all, or one row of
   the kernel from that tap's on. x and grad start at row 0. */
INLINE void add_tile(
    __global float8 *partial, __global const float8 *x, GRAD const float8 *grad, Sizes s,
    const int g_offset[TILE_OUTPUTS], int outputs, int columns, int valid, int i, int j, int first_row, int end_row,
    int is_start)
{
    const int by_channel = s.channels > 1, taps = s.kernel_h * s.kernel_w;
    const int column_x = by_channel ? s.height * s.width : s.apart_h * s.width;
    const int column_partial = by_channel ? taps : s.kernel_w;
    int x_offset[TILE_COLUMNS], x_next[TILE_COLUMNS];
    column_lanes sum[TILE_OUTPUTS][TILE_COLUMNS];
    UNROLL for (int c = 0; c < TILE_COLUMNS; ++c) {
        x_offset[c] = c * EACH * column_x;
        x_next[c] = c * EACH + 1 < valid ? column_x : 0;
    }
    UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o)
        UNROLL for (int c = 0; c < TILE_COLUMNS; ++c) {
            __global const float8 *from = partial + o * s.channels * taps + c * EACH * column_partial;
            sum[o][c] = 0.0f;
            if (!is_start && o < outputs && c < columns)
                sum[o][c] = load_column(from, c * EACH + 1 < valid ? column_partial : 0);
        }
    const int first = first_inside(j, s.pad_w, s.stride);
    const int count = last_inside(j, s.pad_w, s.stride, s.width, s.out_width) - first;
    const int all = (1 << columns) - 1;
    if (by_channel) {
        first_row = larger(first_row, first_inside(i, s.pad_h, s.stride));
        end_row = smaller(end_row, last_inside(i, s.pad_h, s.stride, s.height, s.out_height));
    }
    for (int oy = first_row, next; oy < end_row; oy = next) {
        const int iy = oy * s.stride + i - s.pad_h;
        int mask = all;
        next = end_row;
        if (!by_channel) {
            mask &= rows_inside(iy, s.apart_h, s.height);
            for (next = oy + 1; next < end_row; ++next)
                if ((rows_inside(next * s.stride + i - s.pad_h, s.apart_h, s.height) & all) != mask) break;
        }
#define ADD_ROWS(mask) \
    add_rows(sum, grad + oy * s.out_width + first, g_offset, s.out_width, \
             x + iy * s.width + first * s.stride + j - s.pad_w, x_offset, x_next, s.stride * s.width, next - oy, \
             count, s.stride, mask)
        switch (mask) {
            case 1: ADD_ROWS(1); break;
            case 2: ADD_ROWS(2); break;
            case 3: ADD_ROWS(3); break;
            case 4: ADD_ROWS(4); break;
            case 6: ADD_ROWS(6); break;
            case 7: ADD_ROWS(7); break;
        }
    }
    UNROLL for (int o = 0; o < TILE_OUTPUTS; ++o)
        UNROLL for (int c = 0; c < TILE_COLUMNS; ++c)
            UNROLL for (int channel = 0; channel < EACH; ++channel)
                if (o < outputs && c < columns && c * EACH + channel < valid)
                    partial[o * s.channels * taps + (c * EACH + channel) * column_partial] =
                        channel_of(sum[o][c], channel);
}

#ifdef POOLED

/* Unpools rows [first_row, end_row) of dy: each element goes to the place of the maximum of its 2 x 2 pixels. */
INLINE void spread(
    __local float8 *grad, __global const float8 *pooled, __global const uchar8 *places, int first_row, int end_row,
    int width)
{
    const float8 zero = 0.0f;
    const int pooled_width = width / 2;
    for (int row = first_row; row + 1 < end_row; row += 2) {
        __local float8 *to = grad + (row - first_row) * width;
        for (int px = 0; px < pooled_width; ++px) {
            const float8 value = pooled[row / 2 * pooled_width + px];
            const int8 place = convert_int8(places[row / 2 * pooled_width + px]);
            to[2 * px] = place == 0 ? value : zero;
            to[2 * px + 1] = place == 1 ? value : zero;
            to[width + 2 * px] = place == 2 ? value : zero;
            to[width + 2 * px + 1] = place == 3 ? value : zero;
        }
        if (width % 2) to[width - 1] = to[2 * width - 1] = zero;
    }
    if ((end_row - first_row) % 2)
        for (int p = 0; p < width; ++p) grad[(end_row - 1 - first_row) * width + p] = zero;
}

#endif

/* partial[chunk][O][C][kernel_h * kernel_w]: the weight gradient of a chunk of image blocks, lanes not yet added.
   A chunk is a fixed number of images, so the order of all sums is the same on any number of cores. dy is processed in
   runs of rows that stay in the L1 cache, with the rows of x that they use, for all taps. */
KERNEL weight_gradient(
    __global const float8 *packed, __global const float8 *packed_grad, __global float8 *partial,
#ifdef POOLED
    __global const uchar8 *places,
#endif
    int blocks, int blocks_each, int rows_each, SIZES_ARGS)
{
#ifdef POOLED
    __local float8 grad_near[TILE_OUTPUTS * POOLED];
    const int pooled_plane = (out_height / 2) * (out_width / 2), grad_plane = POOLED;
#else
    const int grad_plane = out_height * out_width;
#endif
    const Sizes s = SIZES;
    const int tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int group = s.groups > 1 ? get_global_id(0) / tiles : 0;
    const int o = (get_global_id(0) - group * tiles) * TILE_OUTPUTS, chunk = get_global_id(1);
    const int outputs_valid = smaller(TILE_OUTPUTS, outputs - o);
    const int plane = height * width, taps = kernel_h * kernel_w;
    const int by_channel = channels > 1, columns = by_channel ? (channels + EACH - 1) / EACH : kernel_h;
    int g_offset[TILE_OUTPUTS];
    UNROLL for (int i = 0; i < TILE_OUTPUTS; ++i) g_offset[i] = smaller(i, outputs_valid - 1) * grad_plane;
    partial += (((long)chunk * s.groups + group) * outputs + o) * channels * taps;
    const int first_block = chunk * blocks_each, last_block = smaller(first_block + blocks_each, blocks);
    for (int block = first_block; block < last_block; ++block) {
        __global const float8 *x = packed + ((long)block * s.groups + group) * channels * plane;
        for (int row = 0; row < out_height; row += rows_each) {
            const int end_row = smaller(row + rows_each, out_height);
#ifdef POOLED
            const long start = ((long)block * outputs + o) * pooled_plane;
            for (int i = 0; i < outputs_valid; ++i)
                spread(grad_near + i * POOLED, packed_grad + start + i * pooled_plane,
                       places + start + i * pooled_plane, row, end_row, out_width);
            __local const float8 *grad = grad_near - row * out_width;
#else
            __global const float8 *grad = packed_grad + (((long)block * s.groups + group) * outputs + o) * grad_plane;
#endif
            for (int column = 0, count; column < columns; column += count) {
                /* The last four columns are two tiles of two: a tile of one has too few sums to fill the pipeline. */
                count = columns - column == 4 ? 2 : smaller(TILE_COLUMNS, columns - column);
                for (int i = 0; i < (by_channel ? kernel_h : 1); ++i)
                    for (int j = 0; j < kernel_w; ++j)
                        add_tile(
                            partial + (by_channel ? column * EACH * taps + i * kernel_w : column * kernel_w) + j,
                            x + (by_channel ? column * EACH * plane : 0), grad, s, g_offset, outputs_valid, count,
                            by_channel ? channels - column * EACH : count, (by_channel ? i : column) * s.apart_h,
                            j * s.apart_w, row, end_row, block == first_block && row == 0);
            }
        }
    }
}
