/* Squared error and its gradient. */

/* out[block] = scale * sum of (x - y)^2 over one block of elements */
__kernel void squared_error(__global float *restrict out, __global const float *x, __global const float *y, int count,
                            int block, int blocks, float scale) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(unit, blocks) {
        const int first = unit * block, length = smaller(block, count - first);
        lanes sums = 0.0f;
        FOR_COLUMN_LANES(i, length) {
            const lanes d = load_lanes(x + first + i, length - i, 0.0f) - load_lanes(y + first + i, length - i, 0.0f);
            sums += d * d;
        }
        const float total = GROUP_SUM(lanes_sum(sums), scratch);
        if (GROUP_LEADER) out[unit] = scale * total;
    }
}

__kernel void squared_difference(__global float *restrict out, __global const float *x, __global const float *y,
                                 int count) {
    FOR_ELEMENTS(i, count) out[i] = (x[i] - y[i]) * (x[i] - y[i]);
}

/* dx = 2 scale g (x - y), where g is one number (g_step 0) or one per element (g_step 1) */
__kernel void squared_error_grad(__global float *restrict dx, __global const float *g, __global const float *x,
                                 __global const float *y, int g_step, float scale, int count) {
    if (g_step) {
        FOR_ELEMENTS(i, count) dx[i] = 2.0f * scale * g[i] * (x[i] - y[i]);
    } else {
        const float factor = 2.0f * scale * g[0];
        FOR_ELEMENTS(i, count) dx[i] = factor * (x[i] - y[i]);
    }
}
