/* One optimizer step over `count` of the flat parameters p, from `first` on, with gradients g; PyTorch's formulas. Both
   numbers are multiples of LANES; padding is zero in p and g, and every formula keeps it zero. `ascend`: upwards. */

#define GRADIENT(i) (ascend ? -g[i] : g[i])
#define GRADIENTS(i) (ascend ? -load_lanes(g + i, LANES, 0.0f) : load_lanes(g + i, LANES, 0.0f))

__kernel void sgd(__global float *restrict p, __global const float *restrict g, int ascend, float lr,
                  float weight_decay, int first, int count) {
    p += first, g += first;
    FOR_ELEMENTS(i, count) p[i] -= lr * (GRADIENT(i) + weight_decay * p[i]);
}

/* `share` of the gradient is added to the velocity: 1 - dampening, and 1 in the first step. */
__kernel void sgd_momentum(__global float *restrict p, __global const float *restrict g, int ascend,
                           __global float *restrict velocity, float lr, float weight_decay, float momentum,
                           float share, int nesterov, int first, int count) {
    p += first, g += first, velocity += first;
    if (nesterov) {
        FOR_ELEMENTS(i, count) {
            const float d = GRADIENT(i) + weight_decay * p[i];
            const float v = momentum * velocity[i] + d;
            velocity[i] = v;
            p[i] -= lr * (d + momentum * v);
        }
    } else {
        FOR_ELEMENTS(i, count) {
            const float d = GRADIENT(i) + weight_decay * p[i];
            const float v = momentum * velocity[i] + (share == 1.0f ? d : share * d);
            velocity[i] = v;
            p[i] -= lr * v;
        }
    }
}

/* Adam (Kingma and Ba, 2015) with weight_decay in the gradient; AdamW (Loshchilov and Hutter, 2019) with `shrink`,
   1 - lr * weight_decay, on the parameters. step_size and root_correction hold the bias corrections. `largest` is used
   with amsgrad (Reddi et al., 2018), else it may be any buffer. */
__kernel void adam(__global float *restrict p, __global const float *restrict g, int ascend,
                   __global float *restrict mean, __global float *restrict square, __global float *largest, int amsgrad,
                   float beta1, float beta2, float eps, float weight_decay, float shrink, float step_size,
                   float root_correction, int first, int count) {
    p += first, g += first, mean += first, square += first, largest += first;
    FOR_LANES(i, count) {
        const lanes before = load_lanes(p + i, LANES, 0.0f) * shrink;
        const lanes d = GRADIENTS(i) + weight_decay * before;
        const lanes m0 = load_lanes(mean + i, LANES, 0.0f);
        const lanes m = m0 + (1.0f - beta1) * (d - m0);
        lanes s = beta2 * load_lanes(square + i, LANES, 0.0f) + (1.0f - beta2) * d * d;
        store_lanes(m, mean + i, LANES);
        store_lanes(s, square + i, LANES);
        if (amsgrad) {
            s = fmax(load_lanes(largest + i, LANES, 0.0f), s);
            store_lanes(s, largest + i, LANES);
        }
        store_lanes(before - step_size * m / (sqrt(s) / root_correction + eps), p + i, LANES);
    }
}

/* Adadelta (Zeiler, 2012). */
__kernel void adadelta(__global float *restrict p, __global const float *restrict g, int ascend,
                       __global float *restrict square, __global float *restrict moved, float lr, float rho, float eps,
                       float weight_decay, int first, int count) {
    p += first, g += first, square += first, moved += first;
    FOR_LANES(i, count) {
        const lanes before = load_lanes(p + i, LANES, 0.0f);
        const lanes d = GRADIENTS(i) + weight_decay * before;
        const lanes s = rho * load_lanes(square + i, LANES, 0.0f) + (1.0f - rho) * d * d;
        const lanes m = load_lanes(moved + i, LANES, 0.0f);
        const lanes by = sqrt(m + eps) / sqrt(s + eps) * d;
        store_lanes(s, square + i, LANES);
        store_lanes(rho * m + (1.0f - rho) * by * by, moved + i, LANES);
        store_lanes(before - lr * by, p + i, LANES);
    }
}

/* Adagrad (Duchi et al., 2011); `initial` is what the sum of squares begins with. */
__kernel void adagrad(__global float *restrict p, __global const float *restrict g, int ascend,
                      __global float *restrict square, float lr, float eps, float weight_decay, float initial, int first,
                      int count) {
    p += first, g += first, square += first;
    FOR_LANES(i, count) {
        const lanes before = load_lanes(p + i, LANES, 0.0f);
        const lanes d = GRADIENTS(i) + weight_decay * before;
        const lanes s = load_lanes(square + i, LANES, 0.0f) + d * d;
        store_lanes(s, square + i, LANES);
        store_lanes(before - lr * d / (sqrt(s + initial) + eps), p + i, LANES);
    }
}

/* RMSProp (Hinton, 2012). `mean` is used when centered, `velocity` with momentum; else they may be any buffer. */
__kernel void rmsprop(__global float *restrict p, __global const float *restrict g, int ascend,
                      __global float *restrict square, __global float *mean, __global float *velocity, float lr,
                      float alpha, float eps, float weight_decay, float momentum, int centered, int first, int count) {
    p += first, g += first, square += first, mean += first, velocity += first;
    FOR_LANES(i, count) {
        const lanes before = load_lanes(p + i, LANES, 0.0f);
        const lanes d = GRADIENTS(i) + weight_decay * before;
        const lanes s = alpha * load_lanes(square + i, LANES, 0.0f) + (1.0f - alpha) * d * d;
        store_lanes(s, square + i, LANES);
        lanes variance = s;
        if (centered) {
            const lanes m0 = load_lanes(mean + i, LANES, 0.0f);
            const lanes m = m0 + (1.0f - alpha) * (d - m0);
            store_lanes(m, mean + i, LANES);
            variance = s - m * m;
        }
        lanes v = d / (sqrt(variance) + eps);
        if (momentum != 0.0f) {
            v += momentum * load_lanes(velocity + i, LANES, 0.0f);
            store_lanes(v, velocity + i, LANES);
        }
        store_lanes(before - lr * v, p + i, LANES);
    }
}
