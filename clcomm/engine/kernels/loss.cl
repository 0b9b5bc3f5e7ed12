/* Losses of pairs of elements, and their gradients from g: one number (g_step 0) or one for each element (g_step 1). */

/* out[block] = 1 / divisor * sum of (x - y)^2 over one block of elements */
__kernel void squared_error(__global float *restrict out, __global const float *x, __global const float *y, int count,
                            int block, int blocks, float divisor) {
    GROUP_SCRATCH(scratch);
    FOR_ROWS(unit, blocks) {
        const int first = unit * block, length = smaller(block, count - first);
        lanes sums = 0.0f;
        FOR_COLUMN_LANES(i, length) {
            const lanes d = load_lanes(x + first + i, length - i, 0.0f) - load_lanes(y + first + i, length - i, 0.0f);
            sums += d * d;
        }
        const float total = GROUP_SUM(lanes_sum(sums), scratch);
        if (GROUP_LEADER) out[unit] = total / divisor;
    }
}

__kernel void squared_difference(__global float *restrict out, __global const float *x, __global const float *y,
                                 int count) {
    FOR_ELEMENTS(i, count) out[i] = (x[i] - y[i]) * (x[i] - y[i]);
}

/* dx = 2 scale g (x - y), where g is one number (g_step 0) or one per element (g_step 1) */
__kernel void squared_error_grad(__global float *restrict dx, __global const float *g, __global const float *x,
                                 __global const float *y, int g_step, float scale, int count) {
    if (g_step) {
        FOR_ELEMENTS(i, count) dx[i] = 2.0f * scale * g[i] * (x[i] - y[i]);
    } else {
        const float factor = 2.0f * scale * g[0];
        FOR_ELEMENTS(i, count) dx[i] = factor * (x[i] - y[i]);
    }
}

/* factor times d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, of d = x - y */
__kernel void smooth_l1(__global float *restrict out, __global const float *x, __global const float *y, float beta,
                        float factor, int count) {
    FOR_LANES(i, count) {
        const int left = count - i;
        const lanes apart = load_lanes(x + i, left, 0.0f) - load_lanes(y + i, left, 0.0f), size = size_of(apart);
        const lanes near = 0.5f * apart * apart / beta, far = size - 0.5f * beta;
        store_lanes(factor * (size < beta ? near : far), out + i, left);
    }
}

__kernel void smooth_l1_grad(__global float *restrict dx, __global const float *g, __global const float *x,
                             __global const float *y, int g_step, float scale, float beta, float factor, int count) {
    const lanes of_all = scale * factor * g[0], up = 1.0f, down = -1.0f;
    FOR_LANES(i, count) {
        const int left = count - i;
        const lanes apart = load_lanes(x + i, left, 0.0f) - load_lanes(y + i, left, 0.0f);
        const lanes far = apart > 0.0f ? up : apart < 0.0f ? down : apart;
        const lanes grad = g_step ? scale * factor * load_lanes(g + i, left, 0.0f) : of_all;
        store_lanes(grad * (size_of(apart) < beta ? apart / beta : far), dx + i, left);
    }
}

INLINE lanes weight_at(__global const float *weight, int has_weight, int i, int left) {
    const lanes one = 1.0f;
    return has_weight ? load_lanes(weight + i, left, 1.0f) : one;
}

/* w ((1 - y) x + (1 + (p - 1) y) log(1 + exp(-x))), with exp of a negative number alone */
__kernel void bce_with_logits(__global float *restrict out, __global const float *x, __global const float *y,
                              __global const float *weight, __global const float *positive, int has_weight,
                              int has_positive, int count) {
    FOR_LANES(i, count) {
        const int left = count - i;
        const lanes zero = 0.0f, logit = load_lanes(x + i, left, 0.0f), target = load_lanes(y + i, left, 0.0f);
        const lanes share = 1.0f + (weight_at(positive, has_positive, i, left) - 1.0f) * target;
        const lanes loss = log_of_1_plus(exponential(-size_of(logit))) + (logit < 0.0f ? -logit : zero);
        store_lanes(weight_at(weight, has_weight, i, left) * ((1.0f - target) * logit + share * loss), out + i, left);
    }
}

/* w ((1 - y) - (1 + (p - 1) y) sigmoid(-x)) */
__kernel void bce_with_logits_grad(__global float *restrict dx, __global const float *g, __global const float *x,
                                   __global const float *y, int g_step, float scale, __global const float *weight,
                                   __global const float *positive, int has_weight, int has_positive, int count) {
    FOR_LANES(i, count) {
        const int left = count - i;
        const lanes logit = load_lanes(x + i, left, 0.0f), target = load_lanes(y + i, left, 0.0f);
        const lanes share = 1.0f + (weight_at(positive, has_positive, i, left) - 1.0f) * target;
        const lanes power = exponential(-size_of(logit)), one = 1.0f;
        const lanes rest = (logit < 0.0f ? one : power) / (1.0f + power);
        const lanes one_up = g[0], up = g_step ? load_lanes(g + i, left, 0.0f) : one_up;
        store_lanes(
            scale * up * weight_at(weight, has_weight, i, left) * ((1.0f - target) - share * rest), dx + i, left);
    }
}
