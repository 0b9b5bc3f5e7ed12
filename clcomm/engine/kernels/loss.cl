/* Cross-entropy of logits against class indices, and squared error. */

/* losses[row] = log(sum(exp(x))) - x[target], and the probabilities for the gradient. A target that is no class gives
   NaN rather than a read outside the row. */
__kernel void cross_entropy(__global float *restrict losses, __global float *restrict probabilities,
                            __global const float *restrict x, __global const int *restrict targets, int rows,
                            int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = probabilities + row * columns;
        lanes most = -INFINITY;
        FOR_COLUMN_LANES(i, columns) {
            const lanes value = load_lanes(from + i, columns - i, -INFINITY);
            most = LARGER(most, value);
        }
        const float top = GROUP_MAX(lanes_max(most), scratch);
        lanes sums = 0.0f;
        FOR_COLUMN_LANES(i, columns) {
            const lanes e = exp(load_lanes(from + i, columns - i, -INFINITY) - top);
            store_lanes(e, to + i, columns - i);
            sums += e;
        }
        const float total = GROUP_SUM(lanes_sum(sums), scratch);
        FOR_COLUMNS(i, columns) to[i] /= total;
        if (GROUP_LEADER) {
            const int target = targets[row];
            losses[row] = target >= 0 && target < columns ? log(total) - (from[target] - top) : NAN;
        }
    }
}

/* dx = (probabilities - one_hot(target)) * scale * g, where g is one number (g_step 0) or one per row (g_step 1) */
__kernel void cross_entropy_grad(__global float *restrict dx, __global const float *restrict g,
                                 __global const float *restrict probabilities, __global const int *restrict targets,
                                 int g_step, float scale, int rows, int columns) {
    FOR_ROWS(row, rows) {
        const float factor = g[row * g_step] * scale;
        const int start = row * columns, target = targets[row];
        FOR_COLUMNS(i, columns) dx[start + i] = factor * (probabilities[start + i] - (i == target ? 1.0f : 0.0f));
    }
}

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
    FOR_EACH(i, count) out[i] = (x[i] - y[i]) * (x[i] - y[i]);
}

/* dx = 2 scale g (x - y), where g is one number (g_step 0) or one per element (g_step 1) */
__kernel void squared_error_grad(__global float *restrict dx, __global const float *g, __global const float *x,
                                 __global const float *y, int g_step, float scale, int count) {
    if (g_step) {
        FOR_EACH(i, count) dx[i] = 2.0f * scale * g[i] * (x[i] - y[i]);
    } else {
        const float factor = 2.0f * scale * g[0];
        FOR_EACH(i, count) dx[i] = factor * (x[i] - y[i]);
    }
}
