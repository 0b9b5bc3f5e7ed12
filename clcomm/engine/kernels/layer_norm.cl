/* Layer norm: y = (x - mean) * scale * weight + bias in each row, with scale = 1 / sqrt(variance + eps), and its
   gradients. `parameters` is 0 without weight and bias, 1 with a weight, 2 with both.
   Source: Ba, Kiros and Hinton, "Layer Normalization", 2016. */

INLINE lanes weights_at(__global const float *weight, int i, int left, int parameters) {
    return parameters > 0 ? load_lanes(weight + i, left, 0.0f) : (lanes)(1.0f);
}

__kernel void layer_norm(__global float *restrict y, __global float *restrict means, __global float *restrict scales,
                         __global const float *restrict x, __global const float *restrict weight,
                         __global const float *restrict bias, float eps, int parameters, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = y + row * columns;
        lanes sums = 0.0f, squares = 0.0f;
        FOR_COLUMN_LANES(i, columns) sums += load_lanes(from + i, columns - i, 0.0f);
        const float mean = GROUP_SUM(lanes_sum(sums), scratch) / columns;
        FOR_COLUMN_LANES(i, columns) {
            const lanes apart = load_lanes(from + i, columns - i, mean) - mean;
            squares += apart * apart;
        }
        const float scale = 1.0f / sqrt(GROUP_SUM(lanes_sum(squares), scratch) / columns + eps);
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes normal = (load_lanes(from + i, left, mean) - mean) * scale;
            const lanes shift = parameters > 1 ? load_lanes(bias + i, left, 0.0f) : (lanes)(0.0f);
            store_lanes(normal * weights_at(weight, i, left, parameters) + shift, to + i, left);
        }
        if (GROUP_LEADER) {
            means[row] = mean;
            scales[row] = scale;
        }
    }
}

/* dx = scale * (g w - mean(g w) - n mean(g w n)), where n = (x - mean) * scale */
__kernel void layer_norm_grad(__global float *restrict dx, __global const float *restrict g,
                              __global const float *restrict x, __global const float *restrict means,
                              __global const float *restrict scales, __global const float *restrict weight,
                              int parameters, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        const int start = row * columns;
        const float mean = means[row], scale = scales[row];
        lanes sums = 0.0f, products = 0.0f;
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes up = load_lanes(g + start + i, left, 0.0f) * weights_at(weight, i, left, parameters);
            sums += up;
            products += up * ((load_lanes(x + start + i, left, mean) - mean) * scale);
        }
        const float mean_up = GROUP_SUM(lanes_sum(sums), scratch) / columns;
        const float mean_product = GROUP_SUM(lanes_sum(products), scratch) / columns;
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes up = load_lanes(g + start + i, left, 0.0f) * weights_at(weight, i, left, parameters);
            const lanes normal = (load_lanes(x + start + i, left, mean) - mean) * scale;
            store_lanes(scale * (up - mean_up - normal * mean_product), dx + start + i, left);
        }
    }
}

/* Sums over blocks of rows: dweight[b, i] of g n and dbias[b, i] of g, for the rows from b * block on. */
__kernel void layer_norm_parameter_grads(__global float *restrict dweight, __global float *restrict dbias,
                                         __global const float *restrict g, __global const float *restrict x,
                                         __global const float *restrict means, __global const float *restrict scales,
                                         int rows, int columns, int block, int blocks) {
#ifdef ON_CPU
    const int lines = (columns + LANES - 1) / LANES; /* of a block: LANES columns each */
    FOR_EACH(unit, blocks * lines) {
        const int b = unit / lines, i = unit % lines * LANES, left = columns - i;
        lanes products = 0.0f, sums = 0.0f;
        for (int row = b * block; row < smaller((b + 1) * block, rows); ++row) {
            const lanes up = load_lanes(g + row * columns + i, left, 0.0f);
            products += up * ((load_lanes(x + row * columns + i, left, 0.0f) - means[row]) * scales[row]);
            sums += up;
        }
        store_lanes(products, dweight + b * columns + i, left);
        store_lanes(sums, dbias + b * columns + i, left);
    }
#else
    FOR_EACH(at, blocks * columns) {
        const int b = at / columns, i = at % columns;
        float products = 0.0f, sums = 0.0f;
        for (int row = b * block; row < smaller((b + 1) * block, rows); ++row) {
            const float up = g[row * columns + i];
            products += up * ((x[row * columns + i] - means[row]) * scales[row]);
            sums += up;
        }
        dweight[at] = products;
        dbias[at] = sums;
    }
#endif
}
