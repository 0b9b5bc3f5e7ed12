/* Softmax and log-softmax of each row, with their gradients. The row's maximum is taken off first. */

__kernel void softmax(__global float *restrict y, __global const float *restrict x, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = y + row * columns;
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
    }
}

/* dx = y (g - sum(g y)) */
__kernel void softmax_grad(__global float *restrict dx, __global const float *restrict g, __global const float *restrict y,
                           int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        const int start = row * columns;
        lanes partial = 0.0f;
        FOR_COLUMN_LANES(i, columns)
            partial += load_lanes(g + start + i, columns - i, 0.0f) * load_lanes(y + start + i, columns - i, 0.0f);
        const float dot_product = GROUP_SUM(lanes_sum(partial), scratch);
        FOR_COLUMNS(i, columns) dx[start + i] = y[start + i] * (g[start + i] - dot_product);
    }
}

__kernel void log_softmax(__global float *restrict y, __global const float *restrict x, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = y + row * columns;
        lanes most = -INFINITY;
        FOR_COLUMN_LANES(i, columns) {
            const lanes value = load_lanes(from + i, columns - i, -INFINITY);
            most = LARGER(most, value);
        }
        const float top = GROUP_MAX(lanes_max(most), scratch);
        lanes sums = 0.0f;
        FOR_COLUMN_LANES(i, columns) sums += exp(load_lanes(from + i, columns - i, -INFINITY) - top);
        const float log_total = log(GROUP_SUM(lanes_sum(sums), scratch));
        FOR_COLUMNS(i, columns) to[i] = (from[i] - top) - log_total;
    }
}

/* dx = g - exp(y) sum(g) */
__kernel void log_softmax_grad(__global float *restrict dx, __global const float *restrict g,
                               __global const float *restrict y, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        const int start = row * columns;
        lanes partial = 0.0f;
        FOR_COLUMN_LANES(i, columns) partial += load_lanes(g + start + i, columns - i, 0.0f);
        const float total = GROUP_SUM(lanes_sum(partial), scratch);
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes probability = exp(load_lanes(y + start + i, left, 0.0f));
            store_lanes(load_lanes(g + start + i, left, 0.0f) - probability * total, dx + start + i, left);
        }
    }
}
