/* out = x with its dimensions reordered. `plan` holds the sizes of out's `dims` dimensions, then their strides in x. */
__kernel void transpose(__global float *restrict out, __global const float *restrict x, __global const int *plan,
                        int dims, int rows, int inner) {
    const int step = plan[2 * dims - 1];
#ifdef ON_CPU
    FOR_EACH(row, rows) {
        __global const float *from = x;
        for (int d = dims - 2, rest = row; d >= 0; rest /= plan[d], --d) from += (rest % plan[d]) * plan[dims + d];
        for (int i = 0; i < inner; ++i) out[row * inner + i] = from[i * step];
    }
#else
    FOR_EACH(at, rows * inner) {
        int from = (at % inner) * step;
        for (int d = dims - 2, rest = at / inner; d >= 0; rest /= plan[d], --d)
            from += (rest % plan[d]) * plan[dims + d];
        out[at] = x[from];
    }
#endif
}

/* out[count][columns][rows] = x[count][rows][columns] on a CPU, by tiles of 8 x 8. */
__kernel void transpose_matrices(__global float *restrict out, __global const float *restrict x, int count, int rows,
                                 int columns) {
#ifdef ON_CPU
    const int tiles = (rows + 7) / 8; /* of a matrix; a work-item has whole rows of x */
    FOR_EACH(tile, count * tiles) {
        const int row = tile % tiles * 8, height = min(8, rows - row);
        __global const float *from = x + ((long)(tile / tiles) * rows + row) * columns;
        __global float *to = out + (long)(tile / tiles) * rows * columns + row;
        int column = 0;
        for (; height == 8 && column + 8 <= columns; column += 8) {
            float8 r[8];
            UNROLL for (int i = 0; i < 8; ++i) r[i] = load8(from + (long)i * columns + column);
            transpose8(r);
            UNROLL for (int i = 0; i < 8; ++i) store8(r[i], to + (long)(column + i) * rows);
        }
        for (; column < columns; ++column)
            for (int i = 0; i < height; ++i) to[(long)column * rows + i] = from[(long)i * columns + column];
    }
#endif
}

/* y = x above or below a diagonal of matrices, else 0. */
__kernel void triangle(__global float *restrict y, __global const float *restrict x, int diagonal, int upper, int rows,
                       int columns, int count) {
    FOR_EACH(row, count) { /* of all matrices */
        const int edge = row % rows + diagonal; /* the column on the diagonal */
        __global const float *from = x + (long)row * columns;
        __global float *to = y + (long)row * columns;
        for (int column = 0; column < columns; ++column)
            to[column] = (upper ? column >= edge : column <= edge) ? from[column] : 0.0f;
    }
}

/* Copies a block of x into a block of out. `plan` holds the block's sizes in `dims` dimensions, then their strides in
   out, then in x; the first elements are at out_first and x_first. */
__kernel void copy_block(__global float *restrict out, __global const float *restrict x, __global const int *plan,
                         int dims, int out_first, int x_first, int rows, int inner) {
    const int to_step = plan[2 * dims - 1], from_step = plan[3 * dims - 1];
#ifdef ON_CPU
    FOR_EACH(row, rows) {
        __global float *to = out + out_first;
        __global const float *from = x + x_first;
        for (int d = dims - 2, rest = row; d >= 0; --d) {
            const int above = d ? rest / plan[d] : 0, place = rest - above * plan[d];
            to += place * plan[dims + d];
            from += place * plan[2 * dims + d];
            rest = above;
        }
        if (to_step == 1 && from_step == 1)
            for (int i = 0; i < inner; ++i) to[i] = from[i];
        else if (to_step == 1 && from_step == -1)
            for (int i = 0; i < inner; ++i) to[i] = from[-i];
        else if (to_step == -1 && from_step == 1)
            for (int i = 0; i < inner; ++i) to[-i] = from[i];
        else
            for (int i = 0; i < inner; ++i) to[i * to_step] = from[i * from_step];
    }
#else
    FOR_EACH(at, rows * inner) {
        int to = out_first + (at % inner) * to_step, from = x_first + (at % inner) * from_step;
        for (int d = dims - 2, rest = at / inner; d >= 0; rest /= plan[d], --d) {
            to += (rest % plan[d]) * plan[dims + d];
            from += (rest % plan[d]) * plan[2 * dims + d];
        }
        out[to] = x[from];
    }
#endif
}
