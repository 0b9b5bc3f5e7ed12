/* The order of elements along a dimension, and what depends on those before: of x[outer][length][inner]. */

/* indices[outer][inner] of the largest element, of sign 1, or the smallest, of -1: the first of equals, and of NaN. */
__kernel void extreme(__global int *restrict indices, __global const float *restrict x, float sign, int outer, int length,
                      int inner) {
    FOR_EACH(i, outer * inner) {
        __global const float *from = x + (long)(i / inner) * length * inner + i % inner;
        float best = sign * from[0];
        int at = 0;
        for (int k = 1; k < length && best == best; ++k) {
            const float value = sign * from[(long)k * inner];
            if (value > best || value != value) best = value, at = k;
        }
        indices[i] = at;
    }
}

INLINE int comes_first(float a, float b, float sign) {
    /* NaN counts as larger than all others. */
    if (a != a || b != b) return sign > 0.0f ? b != b : a != a;
    return sign * a <= sign * b;
}

/* Indices in the order of the elements, ascending of sign 1, equals in their own order: a merge sort from runs of 1 on,
   between `indices` and `other`. */
__kernel void sorted(__global int *restrict indices, __global int *restrict other, __global const float *restrict x,
                     float sign, int outer, int length, int inner) {
    FOR_EACH(i, outer * inner) {
        const long start = (long)(i / inner) * length * inner + i % inner;
        int passes = 0;
        for (int run = 1; run < length; run *= 2) ++passes;
        __global int *from = (passes % 2 ? other : indices) + start, *to = (passes % 2 ? indices : other) + start;
        for (int k = 0; k < length; ++k) from[(long)k * inner] = k;
        for (int run = 1; run < length; run *= 2) {
            for (int low = 0; low < length; low += 2 * run) {
                const int middle = min(low + run, length), high = min(low + 2 * run, length);
                int left = low, right = middle;
                for (int k = low; k < high; ++k) {
                    const int takes_left = left < middle
                        && (right >= high
                            || comes_first(x[start + (long)from[(long)left * inner] * inner],
                                           x[start + (long)from[(long)right * inner] * inner], sign));
                    to[(long)k * inner] = from[(long)(takes_left ? left++ : right++) * inner];
                }
            }
            __global int *const turned = from;
            from = to;
            to = turned;
        }
    }
}

/* The sums of all elements up to each, from the last on with `from_end`. */
__kernel void running(__global float *restrict y, __global const float *restrict x, int from_end, int outer, int length,
                      int inner) {
    FOR_EACH(i, outer * inner) {
        const long start = (long)(i / inner) * length * inner + i % inner;
        float so_far = 0.0f;
        for (int k = 0; k < length; ++k) {
            const long at = start + (long)(from_end ? length - 1 - k : k) * inner;
            so_far += x[at];
            y[at] = so_far;
        }
    }
}

__kernel void product(__global float *restrict y, __global const float *restrict x, int outer, int length, int inner) {
    FOR_EACH(i, outer * inner) {
        __global const float *from = x + (long)(i / inner) * length * inner + i % inner;
        float so_far = 1.0f;
        for (int k = 0; k < length; ++k) so_far *= from[(long)k * inner];
        y[i] = so_far;
    }
}

/* The gradient of a product: g times the product of the others, those before first, then those behind. */
__kernel void product_grad(__global float *restrict dx, __global const float *restrict g, __global const float *restrict x,
                           int outer, int length, int inner) {
    FOR_EACH(i, outer * inner) {
        const long start = (long)(i / inner) * length * inner + i % inner;
        float before = 1.0f, behind = 1.0f;
        for (int k = 0; k < length; ++k) {
            dx[start + (long)k * inner] = before;
            before *= x[start + (long)k * inner];
        }
        for (int k = length - 1; k >= 0; --k) {
            dx[start + (long)k * inner] *= g[i] * behind;
            behind *= x[start + (long)k * inner];
        }
    }
}
