/* Rows of a table by their indices, and the gradient of the table. An index that is not one of the table gives a row of
   NaN, is noted in `outside`, and adds to no gradient. */

__kernel void embedding(__global float *restrict y, __global const float *restrict table,
                        __global const int *restrict indices, __global int *restrict outside, int entries, int rows,
                        int columns) {
    FOR_ROWS(row, rows) {
        const int index = indices[row];
        const int is_there = index >= 0 && index < entries;
        if (!is_there) note_outside(outside, index, -entries);
        __global const float *from = table + (long)(is_there ? index : 0) * columns;
        __global float *to = y + (long)row * columns;
        FOR_COLUMN_LANES(i, columns) {
            const lanes values = load_lanes(from + i, columns - i, 0.0f);
            store_lanes(is_there ? values : (lanes)(NAN), to + i, columns - i);
        }
    }
}

/* Adds row after row, in the order of the indices, to `dtable`, whose values are zeros; nothing to the row `padding`. A
   work-item has columns of its own, so that equal indices are added in one order on any device. */
__kernel void embedding_grad(__global float *restrict dtable, __global const float *restrict g,
                             __global const int *restrict indices, int entries, int padding, int rows, int columns) {
#ifdef ON_CPU
    const int lines = (columns + LANES - 1) / LANES;
    const int first = LANES * run_first(lines), last = smaller(LANES * run_last(lines), columns);
    for (int row = 0; row < rows; ++row) {
        const int index = indices[row];
        if (index < 0 || index >= entries || index == padding) continue;
        __global float *to = dtable + (long)index * columns;
        for (int i = first; i < last; i += LANES) {
            const int left = columns - i;
            store_lanes(load_lanes(to + i, left, 0.0f) + load_lanes(g + (long)row * columns + i, left, 0.0f), to + i,
                        left);
        }
    }
#else
    FOR_EACH(i, columns) {
        for (int row = 0; row < rows; ++row) {
            const int index = indices[row];
            if (index >= 0 && index < entries && index != padding)
                dtable[(long)index * columns + i] += g[(long)row * columns + i];
        }
    }
#endif
}
