/* The loss of connectionist temporal classification (Graves et al., 2006) of x[steps][samples][classes], logarithms of
   probabilities. A sample's path passes its labels, with blanks around each: 2 * length + 1 states, of
   `width` places in `alpha`. A work-item has a sample. Labels and lengths that do not fit give NaN. */

/* Where a sample's labels begin: of `stride` places each, or (0) one after the other. */
INLINE int first_label(__global const int *lengths, int sample, int stride) {
    int first = sample * stride;
    for (int k = 0; !stride && k < sample; ++k) first += lengths[k];
    return first;
}

INLINE int fits(__global const int *labels, int first, int length, int own_steps, int room, int blank, int steps,
                int classes, int width) {
    int is_right = own_steps >= 0 && own_steps <= steps && length >= 0 && 2 * length < width && first >= 0
        && length <= room - first;
    for (int k = 0; is_right && k < length; ++k)
        is_right = labels[first + k] >= 0 && labels[first + k] < classes && labels[first + k] != blank;
    return is_right;
}

INLINE int label_of(__global const int *labels, int state, int blank) { return state % 2 ? labels[state / 2] : blank; }

/* Whether a path may come to a label's state from the one before, past the blank between them. */
INLINE int may_skip(__global const int *labels, int state) {
    return state % 2 && state > 1 && labels[state / 2] != labels[state / 2 - 1];
}

INLINE float log_sum(float a, float b, float c) {
    const float most = fmax(fmax(a, b), c);
    return most == -INFINITY ? most : most + log(exp(a - most) + exp(b - most) + exp(c - most));
}

__kernel void ctc(__global float *restrict losses, __global float *restrict alpha, __global const float *restrict x,
                  __global const int *restrict targets, __global const int *restrict steps_of,
                  __global const int *restrict lengths, int stride, int room, int blank, int steps, int samples,
                  int classes, int width) {
    FOR_EACH(n, samples) {
        const int first = first_label(lengths, n, stride), length = lengths[n], own_steps = steps_of[n];
        const int is_right = fits(targets, first, length, own_steps, room, blank, steps, classes, width);
        __global const int *labels = targets + (is_right ? first : 0);
        const int states = is_right ? 2 * length + 1 : 0;
        __global float *now = alpha + (long)n * steps * width;
        for (int t = 0; is_right && t < own_steps; ++t, now += width) {
            __global const float *from = x + ((long)t * samples + n) * classes, *last = now - width;
            for (int s = 0; s < states; ++s) {
                float before = s < 2 ? 0.0f : -INFINITY;
                if (t)
                    before = log_sum(last[s], s > 0 ? last[s - 1] : -INFINITY,
                                     may_skip(labels, s) ? last[s - 2] : -INFINITY);
                now[s] = before + from[label_of(labels, s, blank)];
            }
        }
        float loss = is_right ? (length ? INFINITY : 0.0f) : NAN;
        if (is_right && own_steps > 0)
            loss = -log_sum(now[states - 1 - width], states > 1 ? now[states - 2 - width] : -INFINITY, -INFINITY);
        losses[n] = loss;
    }
}

/* As PyTorch's: of x whose exponentials sum up to 1, and with `zeroes` none where a loss is infinite. beta[samples][2]
   [width] has the logarithms of what is left of the paths. */
__kernel void ctc_grad(__global float *restrict dx, __global float *restrict beta, __global const float *restrict g,
                       __global const float *restrict losses, __global const float *restrict alpha,
                       __global const float *restrict x, __global const int *restrict targets,
                       __global const int *restrict steps_of, __global const int *restrict lengths, int zeroes,
                       int stride, int room, int blank, int steps, int samples, int classes, int width) {
    FOR_EACH(n, samples) {
        const int first = first_label(lengths, n, stride), length = lengths[n], own_steps = steps_of[n];
        const int is_right = fits(targets, first, length, own_steps, room, blank, steps, classes, width);
        __global const int *labels = targets + (is_right ? first : 0);
        const int states = is_right ? 2 * length + 1 : 0, is_none = zeroes && losses[n] == INFINITY;
        const float loss = losses[n], is_finite = loss < INFINITY ? 1.0f : NAN;
        for (int t = steps - 1; t >= 0; --t) {
            const long place = ((long)t * samples + n) * classes;
            __global const float *from = x + place;
            const int is_in = t < own_steps || !is_right;
            for (int c = 0; c < classes; ++c)
                dx[place + c] = is_in && !is_none ? exp(from[c]) * g[n] * is_finite : 0.0f;
            if (t >= own_steps || !is_right || is_none) continue;
            __global float *now = beta + ((long)n * 2 + t % 2) * width;
            __global const float *next = beta + ((long)n * 2 + (t + 1) % 2) * width;
            __global const float *reached = alpha + ((long)n * steps + t) * width;
            for (int s = 0; s < states; ++s) {
                const int label = label_of(labels, s, blank);
                float behind = s > states - 3 ? 0.0f : -INFINITY;
                if (t < own_steps - 1)
                    behind = log_sum(next[s], s + 1 < states ? next[s + 1] : -INFINITY,
                                     s + 2 < states && may_skip(labels, s + 2) ? next[s + 2] : -INFINITY);
                now[s] = behind + from[label];
                const float both = reached[s] + behind;
                if (both > -INFINITY) dx[place + label] -= exp(both + loss) * g[n];
            }
        }
    }
}
