/* y[outer][count][inner] of x[outer][length][inner] at indices of the middle dimension: with `each` one for each element
   of y, else one for each of `count` slices. An index that is not one of x gives NaN, and adds to no gradient. */

__kernel void gather(__global float *restrict y, __global const float *restrict x, __global const int *restrict index,
                     int each, int length, int outer, int count, int inner) {
    FOR_EACH(i, outer * count * inner) {
        const int row = i / inner, at = index[each ? i : row % count];
        const int is_there = at >= 0 && at < length;
        const float value = x[((long)(row / count) * length + (is_there ? at : 0)) * inner + i % inner];
        y[i] = is_there ? value : NAN;
    }
}

/* Adds to dx, whose values are zeros. A work-item has elements of `outer` and `inner` of its own, so that equal indices
   are added in their order on any device. */
__kernel void gather_grad(__global float *restrict dx, __global const float *restrict g,
                          __global const int *restrict index, int each, int length, int outer, int count, int inner) {
    FOR_EACH(i, outer * inner) {
        const int block = i / inner, column = i % inner;
        for (int k = 0; k < count; ++k) {
            const int from = (block * count + k) * inner + column, at = index[each ? from : k];
            if (at >= 0 && at < length) dx[((long)block * length + at) * inner + column] += g[from];
        }
    }
}
