/* Softmax and log-softmax of each row and the cross-entropy of logits against class indices, with their gradients. The
   row's maximum is subtracted first, so that exp does not overflow. */

INLINE float row_maximum(__global const float *from, int columns, __local float *scratch) {
#ifdef ON_CPU
    lanes most[4]; /* which do not wait for each other */
    UNROLL for (int n = 0; n < 4; ++n) most[n] = -INFINITY;
    int i = 0;
    for (; i + 32 <= columns; i += 32)
        UNROLL for (int n = 0; n < 4; ++n) {
            const lanes value = load8(from + i + 8 * n);
            most[n] = LARGER(most[n], value);
        }
    for (; i < columns; i += 8) {
        const lanes value = load_lanes(from + i, columns - i, -INFINITY);
        most[0] = LARGER(most[0], value);
    }
    const lanes two = LARGER(most[0], most[1]), others = LARGER(most[2], most[3]), all = LARGER(two, others);
#else
    lanes all = -INFINITY;
    FOR_COLUMNS(i, columns) all = LARGER(all, from[i]);
#endif
    return GROUP_MAX(lanes_max(all), scratch);
}

/* Writes the row's exp(x - top) and returns their sum, by which probabilities are divided. */
INLINE float row_powers(__global float *to, __global const float *from, float top, int columns,
                         __local float *scratch) {
    lanes sums = 0.0f;
    FOR_COLUMN_LANES(i, columns) {
        const lanes e = exponential(load_lanes(from + i, columns - i, -INFINITY) - top);
        store_lanes(e, to + i, columns - i);
        sums += e;
    }
    return GROUP_SUM(lanes_sum(sums), scratch);
}

__kernel void softmax(__global float *restrict y, __global const float *restrict x, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = y + row * columns;
        const float top = row_maximum(from, columns, scratch);
        const float share = 1.0f / row_powers(to, from, top, columns, scratch);
        FOR_COLUMNS(i, columns) to[i] *= share;
    }
}

/* dx = y (g - sum(g y)) */
__kernel void softmax_grad(__global float *restrict dx, __global const float *restrict g,
                           __global const float *restrict y, int rows, int columns) {
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
        const float top = row_maximum(from, columns, scratch);
        lanes sums = 0.0f;
        FOR_COLUMN_LANES(i, columns) sums += exponential(load_lanes(from + i, columns - i, -INFINITY) - top);
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
            const lanes probability = exponential(load_lanes(y + start + i, left, 0.0f));
            store_lanes(load_lanes(g + start + i, left, 0.0f) - probability * total, dx + start + i, left);
        }
    }
}

/* y[row] = log(sum(exp(x))): an infinite maximum is the result. */
__kernel void log_sum_exp(__global float *restrict y, __global const float *restrict x, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        const float top = row_maximum(from, columns, scratch);
        const float base = top == -INFINITY || top == INFINITY ? 0.0f : top;
        lanes sums = 0.0f;
        FOR_COLUMN_LANES(i, columns) sums += exponential(load_lanes(from + i, columns - i, -INFINITY) - base);
        const float log_total = log(GROUP_SUM(lanes_sum(sums), scratch));
        if (GROUP_LEADER) y[row] = base + log_total;
    }
}

/* dx = g exp(x - y) */
__kernel void log_sum_exp_grad(__global float *restrict dx, __global const float *restrict g,
                               __global const float *restrict x, __global const float *restrict y, int rows,
                               int columns) {
    FOR_ROWS(row, rows) {
        const int start = row * columns;
        const float up = g[row], base = y[row];
        FOR_COLUMN_LANES(i, columns)
            store_lanes(up * exponential(load_lanes(x + start + i, columns - i, 0.0f) - base), dx + start + i, columns - i);
    }
}

/* losses[row] = log(sum(exp(x))) - x[target], and dx = (probabilities - one_hot(target)) / count. A target that is not a
   class gives NaN instead of a read outside the row, and is noted in `outside`. With `sums_losses` a CPU's only work-item sums the losses too:
   total = sum(losses) / count. */
__kernel void cross_entropy(__global float *restrict losses, __global float *restrict total, __global float *restrict dx,
                            __global const float *restrict x, __global const int *restrict targets,
                            __global int *restrict outside, float count, int rows, int columns, int sums_losses) {
    GROUP_SCRATCH(scratch);
    const float scale = 1.0f / count;
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = dx + row * columns;
        const float top = row_maximum(from, columns, scratch);
        const float divisor = row_powers(to, from, top, columns, scratch), share = 1.0f / divisor;
        const int target = targets[row], is_class = target >= 0 && target < columns;
        const float factor = is_class ? scale : NAN;
        FOR_COLUMNS(i, columns) to[i] = factor * (to[i] * share - (i == target ? 1.0f : 0.0f));
        if (GROUP_LEADER) {
            losses[row] = is_class ? log(divisor) - (from[target] - top) : NAN;
            if (!is_class) note_outside(outside, target, columns);
        }
    }
#ifdef ON_CPU
    if (sums_losses) *total = sum_run(losses, rows) / count;
#endif
}

/* out[row] = g * x[row], where g is one number (g_step 0) or one per row (g_step 1) */
__kernel void scale_rows(__global float *restrict out, __global const float *restrict g, __global const float *restrict x,
                         int g_step, int rows, int columns) {
    FOR_ROWS(row, rows) {
        const float factor = g[row * g_step];
        const int start = row * columns;
        FOR_COLUMNS(i, columns) out[start + i] = factor * x[start + i];
    }
}
