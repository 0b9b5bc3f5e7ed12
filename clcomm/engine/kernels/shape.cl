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

/* Copies a block of x into a block of out. `plan` holds the block's sizes in `dims` dimensions, then their strides in
   out, then in x; the first elements are at out_first and x_first. */
__kernel void copy_block(__global float *restrict out, __global const float *restrict x, __global const int *plan,
                         int dims, int out_first, int x_first, int rows, int inner) {
    const int to_step = plan[2 * dims - 1], from_step = plan[3 * dims - 1];
#ifdef ON_CPU
    FOR_EACH(row, rows) {
        __global float *to = out + out_first;
        __global const float *from = x + x_first;
        for (int d = dims - 2, rest = row; d >= 0; rest /= plan[d], --d) {
            to += (rest % plan[d]) * plan[dims + d];
            from += (rest % plan[d]) * plan[2 * dims + d];
        }
        if (to_step == 1 && from_step == 1)
            for (int i = 0; i < inner; ++i) to[i] = from[i];
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
