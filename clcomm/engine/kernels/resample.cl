/* y[outer][count][inner] of x[outer][length][inner]: each slice is the sum of two of x's times their weights. `places`
   and `weights` hold those of the first ones, then those of the second ones, `count` each. */

__kernel void resample(__global float *restrict y, __global const float *restrict x, __global const int *restrict places,
                       __global const float *restrict weights, int length, int outer, int count, int inner) {
#ifdef ON_CPU
    FOR_EACH(block, outer) {
        __global const float *const from = x + (long)block * length * inner;
        __global float *to = y + (long)block * count * inner;
        for (int k = 0; k < count; ++k, to += inner) {
            __global const float *const low = from + (long)places[k] * inner, *const high = from + (long)places[count + k] * inner;
            const float near = weights[k], far = weights[count + k];
            for (int j = 0; j < inner; ++j) to[j] = near * low[j] + far * high[j];
        }
    }
#else
    FOR_EACH(i, outer * count * inner) {
        const int row = i / inner, k = row % count;
        __global const float *const from = x + (long)(row / count) * length * inner + i % inner;
        y[i] = weights[k] * from[(long)places[k] * inner] + weights[count + k] * from[(long)places[count + k] * inner];
    }
#endif
}

/* Adds to dx, whose values are zeros, in the order of y's slices. */
__kernel void resample_grad(__global float *restrict dx, __global const float *restrict g,
                            __global const int *restrict places, __global const float *restrict weights, int length,
                            int outer, int count, int inner) {
#ifdef ON_CPU
    FOR_EACH(block, outer) {
        __global float *const to = dx + (long)block * length * inner;
        __global const float *from = g + (long)block * count * inner;
        for (int k = 0; k < count; ++k, from += inner) {
            __global float *const low = to + (long)places[k] * inner;
            __global float *const high = to + (long)places[count + k] * inner;
            const float near = weights[k], far = weights[count + k];
            for (int j = 0; j < inner; ++j) low[j] += near * from[j];
            for (int j = 0; j < inner; ++j) high[j] += far * from[j];
        }
    }
#else
    FOR_EACH(i, outer * inner) {
        const int block = i / inner, column = i % inner;
        __global float *const to = dx + (long)block * length * inner + column;
        for (int k = 0; k < count; ++k) {
            const float grad = g[((long)block * count + k) * inner + column];
            to[(long)places[k] * inner] += weights[k] * grad;
            to[(long)places[count + k] * inner] += weights[count + k] * grad;
        }
    }
#endif
}
