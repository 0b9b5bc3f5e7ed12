/* y[outer][count][inner] of x[outer][length][inner] at indices of the middle dimension: with `each` one for each element
   of y, else one for each of `count` slices. An index that is not one of x gives NaN, is noted in `outside`, and adds to no gradient. */

__kernel void gather(__global float *restrict y, __global const float *restrict x, __global const int *restrict index,
                     __global int *restrict outside, int each, int length, int outer, int count, int inner) {
#ifdef ON_CPU
    const int last = run_last(outer * count * inner), length_of_run = inner == 1 ? count : inner;
    for (int i = run_first(outer * count * inner), next; i < last; i = next) { /* a run of y, as far as it is ours */
        const int place = i % length_of_run, width = min(length_of_run - place, last - i);
        next = i + width;
        if (inner == 1 || each) {
            __global const float *const from = x + (long)(i / inner / count) * length * inner + (inner == 1 ? 0 : place);
            __global const int *const at = index + (each ? i : place);
            const int step = inner == 1 ? 0 : 1;
            for (int j = 0; j < width; ++j) {
                const int is_there = at[j] >= 0 && at[j] < length;
                if (!is_there) note_outside(outside, at[j], -length);
                const float value = from[(long)(is_there ? at[j] : 0) * inner + j * step];
                y[i + j] = is_there ? value : NAN;
            }
        } else {
            const int row = i / inner, at = index[row % count], is_there = at >= 0 && at < length;
            __global const float *const from = x + ((long)(row / count) * length + (is_there ? at : 0)) * inner + place;
            if (!is_there) note_outside(outside, at, -length);
            if (is_there)
                for (int j = 0; j < width; ++j) y[i + j] = from[j];
            else
                for (int j = 0; j < width; ++j) y[i + j] = NAN;
        }
    }
#else
    FOR_EACH(i, outer * count * inner) {
        const int row = i / inner, at = index[each ? i : row % count];
        const int is_there = at >= 0 && at < length;
        if (!is_there) note_outside(outside, at, -length);
        const float value = x[((long)(row / count) * length + (is_there ? at : 0)) * inner + i % inner];
        y[i] = is_there ? value : NAN;
    }
#endif
}

/* Adds to dx, whose values are zeros. A work-item has elements of `outer` and `inner` of its own, so that equal indices
   are added in their order on any device. */
__kernel void gather_grad(__global float *restrict dx, __global const float *restrict g,
                          __global const int *restrict index, int each, int length, int outer, int count, int inner) {
#ifdef ON_CPU
    const int last = run_last(outer * inner);
    for (int i = run_first(outer * inner), next; i < last; i = next) { /* a block's columns, as far as they are ours */
        const int block = i / inner, column = i % inner, width = min(inner - column, last - i);
        __global float *const to = dx + (long)block * length * inner + column;
        next = i + width;
        if (inner == 1) {
            __global const int *const at = index + (each ? (long)block * count : 0);
            __global const float *const from = g + (long)block * count;
            for (int k = 0; k < count; ++k)
                if (at[k] >= 0 && at[k] < length) to[at[k]] += from[k];
            continue;
        }
        for (int k = 0; k < count; ++k) {
            const long row = ((long)block * count + k) * inner + column;
            if (each) {
                for (int j = 0; j < width; ++j) {
                    const int at = index[row + j];
                    if (at >= 0 && at < length) to[(long)at * inner + j] += g[row + j];
                }
            } else if (index[k] >= 0 && index[k] < length) {
                __global float *const slice = to + (long)index[k] * inner;
                for (int j = 0; j < width; ++j) slice[j] += g[row + j];
            }
        }
    }
#else
    FOR_EACH(i, outer * inner) {
        const int block = i / inner, column = i % inner;
        for (int k = 0; k < count; ++k) {
            const int from = (block * count + k) * inner + column, at = index[each ? from : k];
            if (at >= 0 && at < length) dx[((long)block * length + at) * inner + column] += g[from];
        }
    }
#endif
}
