/* Embedding and cross-entropy where each rank has a part of the vocabulary: the tokens from `first` on. */

/* A row of the table for an index of this part, zeros for one of another part; one outside the vocabulary
   gives NaN and is noted in `outside`. */
__kernel void embedding_part(__global float *restrict y, __global const float *restrict table,
                             __global const int *restrict indices, __global int *restrict outside, int first,
                             int entries, int vocabulary, int rows, int columns) {
    FOR_ROWS(row, rows) {
        const int index = indices[row], own = index - first;
        const int is_own = own >= 0 && own < entries, is_there = index >= 0 && index < vocabulary;
        const float other = is_there ? 0.0f : NAN;
        if (!is_there) note_outside(outside, index, -vocabulary);
        __global const float *from = table + (long)(is_own ? own : 0) * columns;
        __global float *to = y + (long)row * columns;
        FOR_COLUMN_LANES(i, columns) {
            const lanes values = load_lanes(from + i, columns - i, 0.0f);
            store_lanes(is_own ? values : (lanes)(other), to + i, columns - i);
        }
    }
}

/* Indices counted from `first` on; -1 for those of other parts. */
__kernel void indices_of_part(__global int *restrict own, __global const int *restrict indices, int first, int entries,
                              int count) {
    FOR_EACH(i, count) {
        const int index = indices[i] - first;
        own[i] = index >= 0 && index < entries ? index : -1;
    }
}

/* For each row of this part's logits the logarithm of sum(exp(x)), an infinite maximum is the result; then, from
   terms[rows] on, the target's logit, 0 where another part has it; with `smooths`, from terms[2 * rows] on, the sum of
   what the logits are below that logarithm. */
__kernel void part_terms(__global float *restrict terms, __global const float *restrict x,
                         __global const int *restrict targets, int first, int smooths, int rows,
                         int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + (long)row * columns;
        lanes most = -INFINITY, sums = 0.0f, below = 0.0f;
        FOR_COLUMN_LANES(i, columns) {
            const lanes value = load_lanes(from + i, columns - i, -INFINITY);
            most = LARGER(most, value);
        }
        const float top = GROUP_MAX(lanes_max(most), scratch);
        const float base = top == -INFINITY || top == INFINITY ? 0.0f : top;
        FOR_COLUMN_LANES(i, columns) sums += exponential(load_lanes(from + i, columns - i, -INFINITY) - base);
        const float log_sum = base + log(GROUP_SUM(lanes_sum(sums), scratch));
        if (smooths) FOR_COLUMN_LANES(i, columns) below += log_sum - load_lanes(from + i, columns - i, log_sum);
        const float all_below = GROUP_SUM(lanes_sum(below), scratch); /* no barrier may be in a branch */
        if (GROUP_LEADER) {
            const int own = targets[row] - first;
            terms[row] = log_sum;
            terms[rows + row] = own >= 0 && own < columns ? from[own] : 0.0f;
            if (smooths) terms[2 * rows + row] = all_below;
        }
    }
}

/* The cross-entropy of each row from all parts' terms, one part after the other, in the order of the parts; logs[row] is
   the logarithm of the sum over all parts. With s for the smoothing and C tokens: (1 - s) (-log p[target]) + s / C sum of
   -log p. A row whose target is `ignored` has no loss and no weight; another that is no token is noted in `outside`. */
__kernel void losses_of_parts(__global float *restrict losses, __global float *restrict row_weights,
                              __global float *restrict logs, __global const float *restrict terms,
                              __global const int *restrict targets, __global int *restrict outside, float smoothing,
                              int ignored, int parts, int vocabulary, int rows) {
    const int step = smoothing > 0.0f ? 3 * rows : 2 * rows, columns = vocabulary / parts;
    FOR_EACH(row, rows) {
        float top = -INFINITY, sum = 0.0f, own = 0.0f, below = 0.0f;
        for (int part = 0; part < parts; ++part) top = LARGER(top, terms[step * part + row]);
        const float base = top == -INFINITY || top == INFINITY ? 0.0f : top;
        for (int part = 0; part < parts; ++part) {
            sum += exp(terms[step * part + row] - base);
            own += terms[step * part + rows + row];
        }
        const float log_sum = base + log(sum);
        for (int part = 0; smoothing > 0.0f && part < parts; ++part)
            below += terms[step * part + 2 * rows + row] + columns * (log_sum - terms[step * part + row]);
        const int target = targets[row];
        const float even = smoothing > 0.0f ? smoothing / vocabulary * below : 0.0f;
        const float smoothed = (1.0f - smoothing) * (log_sum - own) + even;
        const int is_token = target >= 0 && target < vocabulary;
        const float loss = is_token ? smoothed : NAN;
        if (!is_token && target != ignored) note_outside(outside, target, vocabulary);
        logs[row] = log_sum;
        losses[row] = target == ignored ? 0.0f : loss;
        row_weights[row] = target == ignored ? 0.0f : 1.0f;
    }
}

/* This part's gradient of the logits; `g`, `g_step`, `total` and `divides` as in class_losses.cl. */
__kernel void losses_of_parts_grad(__global float *restrict dx, __global const float *restrict g,
                                   __global const float *restrict total, __global const float *restrict x,
                                   __global const float *restrict logs, __global const int *restrict targets, int first,
                                   float smoothing, int ignored, int g_step, int divides, int vocabulary, int rows,
                                   int columns) {
    FOR_ROWS(row, rows) {
        const int target = targets[row], start = row * columns, own = target - first;
        const int is_class = target >= 0 && target < vocabulary;
        const float factor = is_class ? (divides ? g[row * g_step] / total[0] : g[row * g_step]) : NAN;
        const float base = logs[row], share = smoothing / vocabulary;
        FOR_COLUMN_LANES(i, columns) {
            lanes excess = exponential(load_lanes(x + start + i, columns - i, 0.0f) - base) - share;
            if (own >= i && own < i + LANES) ((float *)&excess)[own - i] -= 1.0f - smoothing;
            store_lanes(target == ignored ? (lanes)(0.0f) : factor * excess, dx + start + i, columns - i);
        }
    }
}
