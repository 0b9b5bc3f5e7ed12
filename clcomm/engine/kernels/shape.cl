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
