/* Group norm of x[images, groups, channels, size]: y = (x - mean) * scale * weight + bias with a mean and a scale,
   1 / sqrt(variance + eps), for each image's group of `channels`, and a weight and a bias for each channel; and its
   gradients. `parameters` is 1 with a weight, 2 with both. Source: Wu and He, "Group Normalization", 2018. */

#define GROUP_ARGS int rows, int groups, int channels, int size

/* Runs over `count` elements from `start` on, as many at a time as `left` says, up to LANES. */
#ifdef ON_CPU
#define FOR_RUN(at, left, start, count) for (int at = (start), left = (count); left > 0; at += LANES, left -= LANES)
#else
#define FOR_RUN(at, left, start, count)                                  \
    for (int i = get_local_id(0), left = 1; i < (count); i += ROW_GROUP) \
        for (int at = (start) + i, first = 1; first; first = 0)
#endif

__kernel void group_norm(__global float *restrict y, __global float *restrict means, __global float *restrict scales,
                         __global const float *restrict x, __global const float *restrict weight,
                         __global const float *restrict bias, float eps, int parameters, GROUP_ARGS) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        const int count = channels * size, start = row * count, first_channel = row % groups * channels;
        lanes sums = 0.0f, squares = 0.0f;
        FOR_RUN(at, left, start, count) sums += load_lanes(x + at, left, 0.0f);
        const float mean = GROUP_SUM(lanes_sum(sums), scratch) / count;
        FOR_RUN(at, left, start, count) {
            const lanes apart = load_lanes(x + at, left, mean) - mean;
            squares += apart * apart;
        }
        const float scale = 1.0f / sqrt(GROUP_SUM(lanes_sum(squares), scratch) / count + eps);
        for (int c = 0; c < channels; ++c) {
            const float factor = scale * weight[first_channel + c];
            const float shift = parameters > 1 ? bias[first_channel + c] : 0.0f;
            FOR_RUN(at, left, start + c * size, size)
                store_lanes((load_lanes(x + at, left, mean) - mean) * factor + shift, y + at, left);
        }
        if (GROUP_LEADER) {
            means[row] = mean;
            scales[row] = scale;
        }
    }
}

/* With n = (x - mean) * scale: of each image dbias = sum(g) and dweight = sum(g n), as [images, all channels]; and
   dx = scale * (g w - mean(g w) - n mean(g w n)). */
__kernel void group_norm_grad(__global float *restrict dx, __global float *restrict dweight,
                              __global float *restrict dbias, __global const float *restrict g,
                              __global const float *restrict x, __global const float *restrict means,
                              __global const float *restrict scales, __global const float *restrict weight,
                              int needs_dx, GROUP_ARGS) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        const int count = channels * size, start = row * count, first_channel = row % groups * channels;
        const float mean = means[row], scale = scales[row];
        float weighted = 0.0f, sloped = 0.0f;
        for (int c = 0; c < channels; ++c) {
            lanes sums = 0.0f, products = 0.0f;
            FOR_RUN(at, left, start + c * size, size) {
                const lanes up = load_lanes(g + at, left, 0.0f);
                sums += up;
                products += up * (load_lanes(x + at, left, mean) - mean);
            }
            const float sum = GROUP_SUM(lanes_sum(sums), scratch);
            const float product = GROUP_SUM(lanes_sum(products), scratch) * scale;
            weighted += sum * weight[first_channel + c];
            sloped += product * weight[first_channel + c];
            if (GROUP_LEADER) {
                dbias[row * channels + c] = sum;
                dweight[row * channels + c] = product;
            }
        }
        if (needs_dx) {
            const float mean_up = weighted / count, slope = sloped / count * scale;
            for (int c = 0; c < channels; ++c) {
                const float own = weight[first_channel + c];
                FOR_RUN(at, left, start + c * size, size) {
                    const lanes up = load_lanes(g + at, left, 0.0f), apart = load_lanes(x + at, left, mean) - mean;
                    store_lanes(scale * (own * up - mean_up - apart * slope), dx + at, left);
                }
            }
        }
    }
}
