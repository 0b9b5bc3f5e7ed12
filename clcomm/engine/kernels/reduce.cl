/* Sums over one run of dimensions of x[outer, axis, inner]. Each work unit sums a block of fixed length, so the order
   of additions depends on the shape alone; partial sums are summed by the same kernel again. */

/* inner == 1: out[row, b] = 1 / divisor * sum of x[row, b * block ...] */
__kernel void sum_rows(__global float *restrict out, __global const float *restrict x, int rows, int columns, int block,
                       int blocks, float divisor) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(unit, rows * blocks) {
        const int first = (unit % blocks) * block;
        __global const float *from = x + (unit / blocks) * columns + first;
        const int count = smaller(block, columns - first);
#ifdef ON_CPU
        const float total = sum_run(from, count);
#else
        float partial = 0.0f;
        FOR_COLUMNS(i, count) partial += from[i];
        const float total = GROUP_SUM(partial, scratch);
#endif
        if (GROUP_LEADER) out[unit] = total / divisor;
    }
}

/* out[o, b, i] = 1 / divisor * sum over k of x[o, b * block + k, i] */
__kernel void sum_columns(__global float *restrict out, __global const float *restrict x, int outer, int axis,
                          int inner, int block, int blocks, float divisor) {
#ifdef ON_CPU
    FOR_EACH(unit, outer * blocks) {
        const int first = (unit % blocks) * block;
        const int count = smaller(block, axis - first);
        __global const float *from = x + ((unit / blocks) * axis + first) * inner;
        __global float *to = out + unit * inner;
        int i = 0;
        for (; i + 32 <= inner; i += 32) {
            float8 s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
            for (int k = 0; k < count; ++k) {
                __global const float *line = from + k * inner + i;
                s0 += load8(line);
                s1 += load8(line + 8);
                s2 += load8(line + 16);
                s3 += load8(line + 24);
            }
            store8(s0 / divisor, to + i);
            store8(s1 / divisor, to + i + 8);
            store8(s2 / divisor, to + i + 16);
            store8(s3 / divisor, to + i + 24);
        }
        for (; i < inner; ++i) {
            float total = 0.0f;
            for (int k = 0; k < count; ++k) total += from[k * inner + i];
            to[i] = total / divisor;
        }
    }
#else
    FOR_EACH(at, outer * blocks * inner) {
        const int unit = at / inner, i = at % inner;
        const int first = (unit % blocks) * block;
        const int count = smaller(block, axis - first);
        __global const float *from = x + ((unit / blocks) * axis + first) * inner + i;
        float total = 0.0f;
        for (int k = 0; k < count; ++k) total += from[k * inner];
        out[at] = total / divisor;
    }
#endif
}
