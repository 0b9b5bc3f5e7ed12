/* Batch norm of x[images, channels, size]: y = (x - mean) * scale * weight + bias in each channel, with
   scale = 1 / sqrt(variance + eps), and its gradients. `parameters` is 0 without weight and bias, 1 with a weight, 2 with
   both. Sums run over planes of `size` elements and then over images: their order depends on the shape alone. Long ones
   are those of runs (see `end_run`).
   Source: Ioffe and Szegedy, "Batch Normalization", 2015. */

/* Where the statistics come from: */
#define GIVEN 0      /* the running ones */
#define OF_BATCH 1   /* the batch */
#define TRACKED 2    /* the batch; the running ones move towards them by `momentum` */
#define CUMULATIVE 3 /* the batch; the running ones become the mean of all batches so far */

#define CHANNEL_ARGS int images, int channels, int size

/* Runs over the elements of channel c in the first `planes` images, from index `at` on as many as `left` says, up to
   LANES; the runs of a long sum begin at `from` and have RUN_TERMS terms. */
#ifdef ON_CPU
#define FOR_RUNS(from, planes)            \
    for (int n = 0; n < (planes); ++n)    \
        for (int from = 0; from < size; from += LONG_RUN * LANES)
#define RUN_LEFT(from) smaller(size - from, LONG_RUN * LANES)
#define RUN_TERMS(from) ((RUN_LEFT(from) + LANES - 1) / LANES)
#define FOR_RUN(at, left, from) \
    for (int at = (n * channels + c) * size + from, left = RUN_LEFT(from); left > 0; at += LANES, left -= LANES)
#else
#define FOR_RUNS(from, planes) for (int from = get_local_id(0); from < (planes) * size; from += ROW_GROUP)
#define RUN_TERMS(from) 1
#define FOR_RUN(at, left, from) \
    for (int at = (from / size * channels + c) * size + from % size, left = 1; left > 0; left = 0)
#endif
#define FOR_CHANNEL(at, left, planes) FOR_RUNS(from, planes) FOR_RUN(at, left, from)

/* Sums over channel c in the first `planes` images: of x, and of the squares of its distance from `mean`. */
INLINE lanes sum_of_channel(__global const float *x, int planes, int c, CHANNEL_ARGS) {
    lanes run = 0.0f, sum = 0.0f, excess = 0.0f;
    int terms = 0;
    FOR_RUNS(from, planes) {
        FOR_RUN(at, left, from) run += load_lanes(x + at, left, 0.0f);
        if (is_long(&terms, RUN_TERMS(from))) end_run(&run, &sum, &excess);
    }
    return sum + run;
}

INLINE lanes squares_of_channel(__global const float *x, float mean, int planes, int c, CHANNEL_ARGS) {
    lanes run = 0.0f, sum = 0.0f, excess = 0.0f;
    int terms = 0;
    FOR_RUNS(from, planes) {
        FOR_RUN(at, left, from) {
            const lanes apart = load_lanes(x + at, left, mean) - mean;
            run += apart * apart;
        }
        if (is_long(&terms, RUN_TERMS(from))) end_run(&run, &sum, &excess);
    }
    return sum + run;
}

__kernel void count_batch(__global int *batches) {
    if (get_global_id(0) == 0) batches[0] += 1;
}

INLINE void track(__global float *running, float value, float share) {
    running[0] = (1.0f - share) * running[0] + share * value;
}

__kernel void batch_norm(__global float *restrict y, __global float *restrict means, __global float *restrict scales,
                         __global const float *restrict x, __global const float *restrict weight,
                         __global const float *restrict bias, __global float *running_mean,
                         __global float *running_variance, __global const int *batches, float momentum, float eps,
                         int parameters, int statistics, CHANNEL_ARGS) {
    GROUP_SCRATCH(scratch);
    const int summed = statistics == GIVEN ? 0 : images; /* all items meet at the barriers of the sums */
    FOR_ROWS(c, channels) {
        const float count = (float)images * size;
        const lanes sums = sum_of_channel(x, summed, c, images, channels, size);
        const float own_mean = GROUP_SUM(lanes_sum(sums), scratch) / count;
        const lanes squares = squares_of_channel(x, own_mean, summed, c, images, channels, size);
        const float own_variance = GROUP_SUM(lanes_sum(squares), scratch) / count;
        const float mean = statistics == GIVEN ? running_mean[c] : own_mean;
        const float variance = statistics == GIVEN ? running_variance[c] : own_variance;
        if (GROUP_LEADER && (statistics == TRACKED || statistics == CUMULATIVE)) {
            const float share = statistics == CUMULATIVE ? 1.0f / batches[0] : momentum;
            track(running_mean + c, mean, share);
            track(running_variance + c, variance * (count / (count - 1.0f)), share);
        }
        const float scale = 1.0f / sqrt(variance + eps);
        const float factor = parameters > 0 ? scale * weight[c] : scale;
        const float shift = parameters > 1 ? bias[c] : 0.0f;
        FOR_CHANNEL(at, left, images) store_lanes((load_lanes(x + at, left, mean) - mean) * factor + shift, y + at, left);
        if (GROUP_LEADER) {
            means[c] = mean;
            scales[c] = scale;
        }
    }
}

/* With n = (x - mean) * scale: dbias = sum(g), dweight = sum(g n), and dx = scale * w * (g - mean(g) - n mean(g n)), or
   dx = scale * w * g where the statistics were given. */
__kernel void batch_norm_grad(__global float *restrict dx, __global float *restrict dweight,
                              __global float *restrict dbias, __global const float *restrict g,
                              __global const float *restrict x, __global const float *restrict means,
                              __global const float *restrict scales, __global const float *restrict weight,
                              int parameters, int statistics, int needs_dx, CHANNEL_ARGS) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(c, channels) {
        const float mean = means[c], scale = scales[c];
        lanes sums = 0.0f, products = 0.0f, run = 0.0f, product_run = 0.0f, excess = 0.0f, product_excess = 0.0f;
        int terms = 0;
        FOR_RUNS(from, images) {
            FOR_RUN(at, left, from) {
                const lanes up = load_lanes(g + at, left, 0.0f);
                run += up;
                product_run += up * (load_lanes(x + at, left, mean) - mean);
            }
            if (is_long(&terms, RUN_TERMS(from))) {
                end_run(&run, &sums, &excess);
                end_run(&product_run, &products, &product_excess);
            }
        }
        end_run(&run, &sums, &excess);
        end_run(&product_run, &products, &product_excess);
        const float sum = GROUP_SUM(lanes_sum(sums), scratch);
        const float product = GROUP_SUM(lanes_sum(products), scratch) * scale;
        if (GROUP_LEADER) {
            dbias[c] = sum;
            dweight[c] = product;
        }
        if (needs_dx) {
            const float share = statistics == GIVEN ? 0.0f : 1.0f / ((float)images * size);
            const float factor = parameters > 0 ? scale * weight[c] : scale;
            const float mean_up = sum * share, slope = product * share * scale;
            FOR_CHANNEL(at, left, images) {
                const lanes up = load_lanes(g + at, left, 0.0f), apart = load_lanes(x + at, left, mean) - mean;
                store_lanes(factor * (up - mean_up - apart * slope), dx + at, left);
            }
        }
    }
}

/* Where several ranks have parts of the batch. */

/* Of this rank's part: the mean of each channel, then the sum of its squares apart from that mean, then the number of
   elements of a channel. */
__kernel void moments(__global float *restrict own, __global const float *restrict x, CHANNEL_ARGS) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(c, channels) {
        const float count = (float)images * size;
        const lanes sums = sum_of_channel(x, images, c, images, channels, size);
        const float mean = GROUP_SUM(lanes_sum(sums), scratch) / count;
        const lanes squares = squares_of_channel(x, mean, images, c, images, channels, size);
        const float square = GROUP_SUM(lanes_sum(squares), scratch);
        if (GROUP_LEADER) {
            own[c] = mean;
            own[channels + c] = square;
            if (c == 0) own[2 * channels] = count;
        }
    }
}

/* Mean and variance of each channel over all parts, whose moments are taken in the order of the parts.
   Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979. */
__kernel void combine_moments(__global float *restrict means, __global float *restrict variances,
                              __global float *restrict total, __global const float *restrict moments,
                              __global float *running_mean, __global float *running_variance,
                              __global const int *batches, float momentum, int statistics, int parts, int channels) {
    FOR_EACH(c, channels) {
        float count = 0.0f, mean = 0.0f, square = 0.0f;
        for (int part = 0; part < parts; ++part) {
            __global const float *own = moments + part * (2 * channels + 1);
            const float added = own[2 * channels], sum = count + added, apart = own[c] - mean;
            mean += apart * (added / sum);
            square += own[channels + c] + apart * apart * (count * (added / sum));
            count = sum;
        }
        means[c] = mean;
        variances[c] = square / count;
        if (c == 0) total[0] = count;
        if (statistics == TRACKED || statistics == CUMULATIVE) {
            const float share = statistics == CUMULATIVE ? 1.0f / batches[0] : momentum;
            track(running_mean + c, mean, share);
            track(running_variance + c, square / (count - 1.0f), share);
        }
    }
}

/* dx as batch_norm_grad has it, from sums over all parts: of g, then of g n, with `total` elements of a channel. */
__kernel void batch_norm_dx(__global float *restrict dx, __global const float *restrict g,
                            __global const float *restrict x, __global const float *restrict means,
                            __global const float *restrict scales, __global const float *restrict weight,
                            __global const float *restrict sums, __global const float *restrict total, int parameters,
                            CHANNEL_ARGS) {
    FOR_ROWS(c, channels) {
        const float mean = means[c], scale = scales[c], share = 1.0f / total[0];
        const float factor = parameters > 0 ? scale * weight[c] : scale;
        const float mean_up = sums[c] * share, slope = sums[channels + c] * share * scale;
        FOR_CHANNEL(at, left, images) {
            const lanes up = load_lanes(g + at, left, 0.0f), apart = load_lanes(x + at, left, mean) - mean;
            store_lanes(factor * (up - mean_up - apart * slope), dx + at, left);
        }
    }
}
