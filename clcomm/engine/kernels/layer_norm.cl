/* Layer norm: y = (x - mean) * scale * weight + bias in each row, with scale = 1 / sqrt(variance + eps), and its
   gradients. `parameters` is 0 without weight and bias, 1 with a weight, 2 with both.
   Source: Ba, Kiros and Hinton, "Layer Normalization", 2016. */

INLINE lanes weights_at(__global const float *weight, int i, int left, int parameters) {
    return parameters > 0 ? load_lanes(weight + i, left, 0.0f) : (lanes)(1.0f);
}

#ifdef ON_CPU

/* The sum of (x - mean)^2 over a row, with sums for each of four vectors, which do not wait for each other. */
INLINE float row_squares(__global const float *x, float mean, int columns) {
    float8 sums[4];
    UNROLL for (int n = 0; n < 4; ++n) sums[n] = 0.0f;
    int i = 0;
    for (; i + 32 <= columns; i += 32)
        UNROLL for (int n = 0; n < 4; ++n) {
            const float8 apart = load8(x + i + 8 * n) - mean;
            sums[n] += apart * apart;
        }
    for (; i < columns; i += 8) {
        const float8 apart = load_lanes(x + i, columns - i, mean) - mean;
        sums[0] += apart * apart;
    }
    return lanes_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

#define ROW_SUM(x, columns) sum_run(x, columns)
#define ROW_SQUARES(x, mean, columns) row_squares(x, mean, columns)

#else

INLINE float row_sum(__global const float *x, int columns, __local float *scratch) {
    float sum = 0.0f;
    FOR_COLUMNS(i, columns) sum += x[i];
    return GROUP_SUM(sum, scratch);
}

INLINE float row_squares(__global const float *x, float mean, int columns, __local float *scratch) {
    float sum = 0.0f;
    FOR_COLUMNS(i, columns) sum += (x[i] - mean) * (x[i] - mean);
    return GROUP_SUM(sum, scratch);
}

#define ROW_SUM(x, columns) row_sum(x, columns, scratch)
#define ROW_SQUARES(x, mean, columns) row_squares(x, mean, columns, scratch)

#endif

__kernel void layer_norm(__global float *restrict y, __global float *restrict means, __global float *restrict scales,
                         __global const float *restrict x, __global const float *restrict weight,
                         __global const float *restrict bias, float eps, int parameters, int rows, int columns) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(row, rows) {
        __global const float *from = x + row * columns;
        __global float *to = y + row * columns;
        const float mean = ROW_SUM(from, columns) / columns;
        const float scale = 1.0f / sqrt(ROW_SQUARES(from, mean, columns) / columns + eps);
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

#ifdef ON_CPU

/* Eight columns of a row: `sums` of g w, `products` of g w n, and the row's part of the parameters' gradients. */
INLINE void add_lanes(__global const float *g, __global const float *x, __global const float *weight, float mean,
                      float scale, int parameters, __global float *dweight, __global float *dbias, int i, int left,
                      float8 *sums, float8 *products) {
    const float8 up = load_lanes(g + i, left, 0.0f), normal = (load_lanes(x + i, left, mean) - mean) * scale;
    const float8 weighed = up * weights_at(weight, i, left, parameters);
    *sums += weighed;
    *products += weighed * normal;
    store_lanes(load_lanes(dweight + i, left, 0.0f) + up * normal, dweight + i, left);
    store_lanes(load_lanes(dbias + i, left, 0.0f) + up, dbias + i, left);
}

/* dx, and with what is read for it the parameters' gradients over blocks of rows: dweight[b, i] of g n and dbias[b, i]
   of g, for the rows from b * block on. */
__kernel void layer_norm_all_grads(__global float *restrict dx, __global float *restrict dweight,
                                   __global float *restrict dbias, __global const float *restrict g,
                                   __global const float *restrict x, __global const float *restrict means,
                                   __global const float *restrict scales, __global const float *restrict weight,
                                   int parameters, int rows, int columns, int block, int blocks) {
    FOR_EACH(b, blocks) {
        __global float *own_dweight = dweight + b * columns, *own_dbias = dbias + b * columns;
        for (int i = 0; i < columns; ++i) own_dweight[i] = own_dbias[i] = 0.0f;
        for (int row = b * block; row < smaller((b + 1) * block, rows); ++row) {
            __global const float *own_g = g + row * columns, *own_x = x + row * columns;
            __global float *to = dx + row * columns;
            const float mean = means[row], scale = scales[row];
            float8 sums[2], products[2];
            UNROLL for (int n = 0; n < 2; ++n) sums[n] = products[n] = 0.0f;
#define ADD_LANES(i, left, n) \
    add_lanes(own_g, own_x, weight, mean, scale, parameters, own_dweight, own_dbias, i, left, sums + n, products + n)
            int i = 0;
            for (; i + 16 <= columns; i += 16) {
                ADD_LANES(i, 8, 0);
                ADD_LANES(i + 8, 8, 1);
            }
            for (; i < columns; i += 8) ADD_LANES(i, columns - i, 0);
            const float mean_up = lanes_sum(sums[0] + sums[1]) / columns;
            const float mean_product = lanes_sum(products[0] + products[1]) / columns;
            for (i = 0; i < columns; i += 8) {
                const int left = columns - i;
                const float8 up = load_lanes(own_g + i, left, 0.0f) * weights_at(weight, i, left, parameters);
                const float8 normal = (load_lanes(own_x + i, left, mean) - mean) * scale;
                store_lanes(scale * (up - mean_up - normal * mean_product), to + i, left);
            }
        }
    }
}

#else

/* The parameters' gradients over blocks of rows: dweight[b, i] of g n and dbias[b, i] of g, from row b * block on. */
__kernel void layer_norm_parameter_grads(__global float *restrict dweight, __global float *restrict dbias,
                                         __global const float *restrict g, __global const float *restrict x,
                                         __global const float *restrict means, __global const float *restrict scales,
                                         int rows, int columns, int block, int blocks) {
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
}

#endif

/* The sums of both parameters' gradients over the blocks. */
__kernel void layer_norm_totals(__global float *restrict dweight, __global float *restrict dbias,
                                __global const float *restrict weight_sums, __global const float *restrict bias_sums,
                                int columns, int blocks, int of_weight, int of_bias) {
    FOR_EACH(i, columns) {
        float weight_total = 0.0f, bias_total = 0.0f;
        for (int b = 0; b < blocks; ++b) {
            weight_total += weight_sums[b * columns + i];
            bias_total += bias_sums[b * columns + i];
        }
        if (of_weight) dweight[i] = weight_total;
        if (of_bias) dbias[i] = bias_total;
    }
}
