/* Batch norm of x[images, channels, size]: y = (x - mean) * scale * weight + bias in each channel, with
   scale = 1 / sqrt(variance + eps), and its gradients. `parameters` is 0 without weight and bias, 1 with a weight, 2 with
   both. Sums run over planes of `size` elements and then over images: their order depends on the shape alone.
   Source: Ioffe and Szegedy, "Batch Normalization", 2015. */

/* Where the statistics come from: */
#define GIVEN 0      /* the running ones */
#define OF_BATCH 1   /* the batch */
#define TRACKED 2    /* the batch; the running ones move towards them by `momentum` */
#define CUMULATIVE 3 /* the batch; the running ones become the mean of all batches so far */

#define CHANNEL_ARGS int images, int channels, int size

/* Runs over the elements of channel c in the first `planes` images: from index `at` on as many as `left` says, up to
   LANES. */
#ifdef ON_CPU
#define FOR_CHANNEL(at, left, planes)         \
    for (int n = 0; n < (planes); ++n)        \
        for (int at = (n * channels + c) * size, left = size; left > 0; at += LANES, left -= LANES)
#else
#define FOR_CHANNEL(at, left, planes)                                            \
    for (int i = get_local_id(0), left = 1; i < (planes) * size; i += ROW_GROUP) \
        for (int at = (i / size * channels + c) * size + i % size, first = 1; first; first = 0)
#endif

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
        lanes sums = 0.0f, squares = 0.0f;
        FOR_CHANNEL(at, left, summed) sums += load_lanes(x + at, left, 0.0f);
        const float own_mean = GROUP_SUM(lanes_sum(sums), scratch) / count;
        FOR_CHANNEL(at, left, summed) {
            const lanes apart = load_lanes(x + at, left, own_mean) - own_mean;
            squares += apart * apart;
        }
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
        lanes sums = 0.0f, products = 0.0f;
        FOR_CHANNEL(at, left, images) {
            const lanes up = load_lanes(g + at, left, 0.0f);
            sums += up;
            products += up * (load_lanes(x + at, left, mean) - mean);
        }
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
