/* The loss of connectionist temporal classification (Graves et al., 2006) of x[steps][samples][classes], logarithms of
   probabilities. A sample's path passes its labels with a blank before, between and behind them: 2 * length + 1 states, of
   `width` places in `alpha`. A work-item has a sample. Labels and lengths that do not fit give NaN. */

typedef struct {
    __global const int *labels;
    int steps, length, fits;
} Sample;

INLINE Sample sample_of(__global const int *restrict targets, __global const int *restrict steps_of,
                        __global const int *restrict lengths, int sample, int stride, int room, int blank, int steps,
                        int classes, int width) {
    Sample found;
    int first = sample * stride;
    for (int k = 0; !stride && k < sample; ++k) first += lengths[k];
    found.steps = steps_of[sample], found.length = lengths[sample], found.labels = targets + first;
    found.fits = found.steps >= 0 && found.steps <= steps && found.length >= 0 && 2 * found.length < width && first >= 0
        && found.length <= (stride ? stride : room - first);
    for (int k = 0; found.fits && k < found.length; ++k)
        found.fits = found.labels[k] >= 0 && found.labels[k] < classes && found.labels[k] != blank;
    return found;
}

INLINE int label_of(Sample sample, int state, int blank) { return state % 2 ? sample.labels[state / 2] : blank; }

/* Whether a path may come to a label's state from the one before, past the blank between them. */
INLINE int may_skip(Sample sample, int state) {
    return state % 2 && state > 1 && sample.labels[state / 2] != sample.labels[state / 2 - 1];
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
        const Sample own = sample_of(targets, steps_of, lengths, n, stride, room, blank, steps, classes, width);
        const int states = own.fits ? 2 * own.length + 1 : 0;
        __global float *now = alpha + (long)n * steps * width;
        for (int t = 0; own.fits && t < own.steps; ++t, now += width) {
            __global const float *from = x + ((long)t * samples + n) * classes, *last = now - width;
            for (int s = 0; s < states; ++s) {
                float before = s < 2 ? 0.0f : -INFINITY;
                if (t)
                    before = log_sum(last[s], s > 0 ? last[s - 1] : -INFINITY,
                                     may_skip(own, s) ? last[s - 2] : -INFINITY);
                now[s] = before + from[label_of(own, s, blank)];
            }
        }
        float loss = own.fits ? (own.length ? INFINITY : 0.0f) : NAN;
        if (own.fits && own.steps > 0)
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
        const Sample own = sample_of(targets, steps_of, lengths, n, stride, room, blank, steps, classes, width);
        const int states = own.fits ? 2 * own.length + 1 : 0, is_none = zeroes && losses[n] == INFINITY;
        const float loss = losses[n], is_finite = loss < INFINITY ? 1.0f : NAN;
        for (int t = steps - 1; t >= 0; --t) {
            const long place = ((long)t * samples + n) * classes;
            __global const float *from = x + place;
            const int is_in = t < own.steps || !own.fits;
            for (int c = 0; c < classes; ++c)
                dx[place + c] = is_in && !is_none ? exp(from[c]) * g[n] * is_finite : 0.0f;
            if (t >= own.steps || !own.fits || is_none) continue;
            __global float *now = beta + ((long)n * 2 + t % 2) * width;
            __global const float *next = beta + ((long)n * 2 + (t + 1) % 2) * width;
            __global const float *reached = alpha + ((long)n * steps + t) * width;
            for (int s = 0; s < states; ++s) {
                const int label = label_of(own, s, blank);
                float behind = s > states - 3 ? 0.0f : -INFINITY;
                if (t < own.steps - 1)
                    behind = log_sum(next[s], s + 1 < states ? next[s + 1] : -INFINITY,
                                     s + 2 < states && may_skip(own, s + 2) ? next[s + 2] : -INFINITY);
                now[s] = behind + from[label];
                const float both = reached[s] + behind;
                if (both > -INFINITY) dx[place + label] -= exp(both + loss) * g[n];
            }
        }
    }
}
