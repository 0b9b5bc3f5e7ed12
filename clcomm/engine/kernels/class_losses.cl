/* Losses of rows of scores against class indices, with a weight for each class, and their gradients. A row whose target
   is `ignored` has neither loss nor gradient; another target that is not a class gives NaN instead of a read outside the
   row, and is noted in `outside`. row_weights[row] is the weight of the row's class: a mean is over these. `g` is the gradient of one loss (g_step
   0), or of each row's (g_step 1); with `divides` it is divided by `total`, the sum of the rows' weights. */

INLINE float class_weight(__global const float *weight, int has_weight, int target) {
    return has_weight ? weight[target] : 1.0f;
}

INLINE float row_factor(__global const float *g, int g_step, __global const float *total, int divides, int row) {
    return divides ? g[row * g_step] / total[0] : g[row * g_step];
}

INLINE float weighed_sum(__global const float *x, float top, __global const float *weight, int has_weight, int columns,
                         __local float *scratch) {
    lanes sums = 0.0f;
    FOR_COLUMN_LANES(i, columns) {
        const lanes apart = load_lanes(x + i, columns - i, top) - top;
        sums += has_weight ? apart * load_lanes(weight + i, columns - i, 0.0f) : apart;
    }
    return GROUP_SUM(lanes_sum(sums), scratch);
}

INLINE float weight_sum(__global const float *weight, int has_weight, int columns, __local float *scratch) {
    lanes sums = 0.0f;
    if (has_weight)
        FOR_COLUMN_LANES(i, columns) sums += load_lanes(weight + i, columns - i, 0.0f);
    const float total = GROUP_SUM(lanes_sum(sums), scratch); /* no barrier may be in a branch */
    return has_weight ? total : columns;
}

/* With s for the smoothing and C classes: (1 - s) w[target] (-log p[target]) + s / C sum over c of w[c] (-log p[c]).
   tops[row] is the row's maximum, logs[row] the logarithm of the sum of exp(x - top). */
__kernel void smoothed_losses(__global float *restrict losses, __global float *restrict row_weights,
                              __global float *restrict tops, __global float *restrict logs,
                              __global const float *restrict x, __global const int *restrict targets,
                              __global int *restrict outside, __global const float *restrict weight, int has_weight,
                              float smoothing, int ignored, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        lanes most = -INFINITY, sums = 0.0f;
        FOR_COLUMN_LANES(i, columns) {
            const lanes value = load_lanes(from + i, columns - i, -INFINITY);
            most = LARGER(most, value);
        }
        const float top = GROUP_MAX(lanes_max(most), scratch);
        FOR_COLUMN_LANES(i, columns) sums += exponential(load_lanes(from + i, columns - i, -INFINITY) - top);
        const float log_sum = log(GROUP_SUM(lanes_sum(sums), scratch));
        const float even = log_sum * weight_sum(weight, has_weight, columns, scratch)
            - weighed_sum(from, top, weight, has_weight, columns, scratch);
        if (GROUP_LEADER) {
            const int target = targets[row], is_class = target >= 0 && target < columns;
            const float own = target == ignored ? 0.0f : is_class ? class_weight(weight, has_weight, target) : NAN;
            float loss = own;
            if (target != ignored && is_class)
                loss = (1.0f - smoothing) * own * (log_sum - (from[target] - top))
                    + (smoothing > 0.0f ? smoothing / columns * even : 0.0f);
            if (target != ignored && !is_class) note_outside(outside, target, columns);
            losses[row] = loss;
            row_weights[row] = own;
            tops[row] = top;
            logs[row] = log_sum;
        }
    }
}

/* dx[c] = factor ((1 - s) w[target] (p[c] - (c is target)) + s / C (p[c] sum of w - w[c])) */
__kernel void smoothed_losses_grad(__global float *restrict dx, __global const float *restrict g,
                                   __global const float *restrict total, __global const float *restrict tops,
                                   __global const float *restrict logs, __global const float *restrict x,
                                   __global const int *restrict targets, __global const float *restrict weight,
                                   int g_step, int divides, int has_weight, float smoothing, int ignored, int rows,
                                   int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = dx + row * columns;
        const int target = targets[row], is_class = target >= 0 && target < columns;
        const float factor = row_factor(g, g_step, total, divides, row), top = tops[row], log_sum = logs[row];
        const float own = (1.0f - smoothing) * (is_class ? class_weight(weight, has_weight, target) : NAN);
        const float share = smoothing / columns;
        const float all = own + share * weight_sum(weight, has_weight, columns, scratch);
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes zero = 0.0f, one = 1.0f;
            const lanes weights = has_weight ? load_lanes(weight + i, left, 0.0f) : one;
            const lanes share_of_p = exponential((load_lanes(from + i, left, -INFINITY) - top) - log_sum);
            const lanes slope = factor * (all * share_of_p - share * weights);
            store_lanes(target == ignored ? zero : slope, to + i, left);
        }
#ifndef ON_CPU
        barrier(CLK_GLOBAL_MEM_FENCE);
#endif
        if (GROUP_LEADER && target != ignored && is_class) to[target] -= factor * own;
    }
}

/* -w[target] x[target], of logarithms of probabilities */
__kernel void picked_losses(__global float *restrict losses, __global float *restrict row_weights,
                            __global const float *restrict x, __global const int *restrict targets,
                            __global int *restrict outside, __global const float *restrict weight, int has_weight,
                            int ignored, int rows, int columns) {
    FOR_EACH(row, rows) {
        const int target = targets[row], is_class = target >= 0 && target < columns;
        const float own = target == ignored ? 0.0f : is_class ? class_weight(weight, has_weight, target) : NAN;
        if (target != ignored && !is_class) note_outside(outside, target, columns);
        losses[row] = target != ignored && is_class ? -own * x[row * columns + target] : own;
        row_weights[row] = own;
    }
}

__kernel void picked_losses_grad(__global float *restrict dx, __global const float *restrict g,
                                 __global const float *restrict total, __global const int *restrict targets,
                                 __global const float *restrict weight, int g_step, int divides, int has_weight,
                                 int ignored, int rows, int columns) {
    FOR_ROWS(row, rows) {
        const int target = targets[row], is_class = target >= 0 && target < columns;
        const float factor = row_factor(g, g_step, total, divides, row);
        const float own = is_class ? class_weight(weight, has_weight, target) : NAN, slope = -factor * own;
        FOR_COLUMNS(i, columns)
            dx[row * columns + i] = target == ignored ? 0.0f : is_class ? (i == target ? slope : 0.0f) : slope;
    }
}
