/* The order of elements along a dimension, and what depends on those before: of x[outer][length][inner]. */

/* indices[outer][inner] of the largest element, of sign 1, or the smallest, of -1: the first of equals, and of NaN. */
#ifdef ON_CPU
/* Of elements that lie one behind the other: the first of each lane, then of the lanes. */
INLINE int extreme_of_run(__global const float *x, float sign, int length) {
    const int8 numbers = (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    lanes best = sign * load8(x);
    whole_lanes at = numbers;
    int k = LANES;
    for (; k + LANES <= length; k += LANES) {
        const lanes value = sign * load8(x + k);
        const whole_lanes better = (value > best) | ((value != value) & (best == best)), here = numbers + k;
        best = better ? value : best;
        at = better ? here : at;
    }
    float most = ((float *)&best)[0];
    int first = ((int *)&at)[0];
    for (int lane = 1; lane < LANES; ++lane) {
        const float value = ((float *)&best)[lane];
        const int number = ((int *)&at)[lane], same = value == most || (value != value && most != most);
        if (same ? number < first : value > most || (value != value && most == most)) most = value, first = number;
    }
    for (; k < length; ++k) {
        const float value = sign * x[k];
        if (value > most || (value != value && most == most)) most = value, first = k;
    }
    return first;
}

INLINE float product_of_run(__global const float *x, int length) {
    lanes parts = 1.0f;
    int k = 0;
    for (; k + LANES <= length; k += LANES) parts *= load8(x + k);
    const float4 quarter = parts.lo * parts.hi;
    float product = (quarter.x * quarter.z) * (quarter.y * quarter.w);
    for (; k < length; ++k) product *= x[k];
    return product;
}

/* For each number of a run `g` times the product of the others. Each lane multiplies those of its own: the ones before
   on the way there, and on the way back the ones behind, which begin as the product of the other lanes. */
INLINE void products_of_others(__global float *dx, __global const float *x, float g, int length) {
    const int whole = length / LANES * LANES;
    lanes before = 1.0f, behind;
    for (int k = 0; k < whole; k += LANES) {
        store8(before, dx + k);
        before *= load8(x + k);
    }
    float rest = g, all = g;
    for (int k = whole; k < length; ++k) rest *= x[k];
    for (int lane = 0; lane < LANES; ++lane) {
        all *= ((float *)&before)[lane];
        float others = rest;
        for (int other = 0; other < LANES; ++other) others *= other == lane ? 1.0f : ((float *)&before)[other];
        ((float *)&behind)[lane] = others;
    }
    for (int k = whole - LANES; k >= 0; k -= LANES) {
        store8(load8(dx + k) * behind, dx + k);
        behind *= load8(x + k);
    }
    for (int k = whole; k < length; ++k) {
        float others = all;
        for (int other = whole; other < length; ++other) others *= other == k ? 1.0f : x[other];
        dx[k] = others;
    }
}
#endif

__kernel void extreme(__global int *restrict indices, __global const float *restrict x, float sign, int outer, int length,
                      int inner) {
    FOR_EACH(i, outer * inner) {
        __global const float *from = x + (long)(i / inner) * length * inner + i % inner;
#ifdef ON_CPU
        if (inner == 1 && length >= LANES) {
            indices[i] = extreme_of_run(from, sign, length);
            continue;
        }
#endif
        float best = sign * from[0];
        int at = 0;
        for (int k = 1; k < length && best == best; ++k) {
            const float value = sign * from[(long)k * inner];
            if (value > best || value != value) best = value, at = k;
        }
        indices[i] = at;
    }
}

/* A number that is smaller for an element that comes first, ascending of sign 1, then for a smaller index; NaN counts as
   larger than all others, and -0 as 0. */
INLINE ulong place_of(float value, float sign, int index) {
    const uint bits = as_uint(value + 0.0f);
    const uint ascending = value != value ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return ((ulong)(sign > 0.0f ? ascending : ~ascending) << 32) | (uint)index;
}

/* Sorts numbers: runs of RUN by insertion, then merged between `from` and `to`; returns the one that has the result. */
#define RUN 8
INLINE __global ulong *sorted_run(__global ulong *from, __global ulong *to, int length) {
    for (int low = 0; low < length; low += RUN)
        for (int k = low + 1; k < min(low + RUN, length); ++k) {
            const ulong own = from[k];
            int at = k;
            for (; at > low && from[at - 1] > own; --at) from[at] = from[at - 1];
            from[at] = own;
        }
    for (int run = RUN; run < length; run *= 2) {
        for (int low = 0; low < length; low += 2 * run) {
            const int middle = min(low + run, length), high = min(low + 2 * run, length);
            int left = low, right = middle, k = low;
            while (left < middle && right < high) {
                const ulong a = from[left], b = from[right];
                const int takes_left = a < b;
                to[k++] = takes_left ? a : b;
                left += takes_left;
                right += !takes_left;
            }
            while (left < middle) to[k++] = from[left++];
            while (right < high) to[k++] = from[right++];
        }
        __global ulong *const turned = from;
        from = to;
        to = turned;
    }
    return from;
}

/* Indices in the order of the elements, ascending of sign 1, equals in their own order. scratch: 2 numbers for each. */
__kernel void sorted(__global int *restrict indices, __global ulong *scratch, __global const float *restrict x, float sign,
                     int outer, int length, int inner) {
    FOR_EACH(i, outer * inner) {
        const long start = (long)(i / inner) * length * inner + i % inner;
        __global ulong *const own = scratch + (long)i * length * 2;
        for (int k = 0; k < length; ++k) own[k] = place_of(x[start + (long)k * inner], sign, k);
        __global const ulong *const order = sorted_run(own, own + length, length);
        for (int k = 0; k < length; ++k) indices[start + (long)k * inner] = (int)(uint)order[k];
    }
}

/* indices[outer][most][inner] of the elements that come first, at most MOST_FIRST of them. */
#define MOST_FIRST 64
__kernel void first(__global int *restrict indices, __global const float *restrict x, float sign, int most, int outer,
                    int length, int inner) {
    FOR_EACH(i, outer * inner) {
        __global const float *from = x + (long)(i / inner) * length * inner + i % inner;
        ulong found[MOST_FIRST];
        int count = 0;
        for (int k = 0; k < length; ++k) {
            const ulong own = place_of(from[(long)k * inner], sign, k);
            if (count == most && own > found[most - 1]) continue;
            int at = count < most ? count++ : most - 1;
            for (; at > 0 && found[at - 1] > own; --at) found[at] = found[at - 1];
            found[at] = own;
        }
        __global int *to = indices + (long)(i / inner) * most * inner + i % inner;
        for (int k = 0; k < most; ++k) to[(long)k * inner] = (int)(uint)found[k];
    }
}

/* The sums of all elements up to each, from the last on with `from_end`: runs are summed by themselves, and added with what
   rounding took from those before, as in `end_run`. */
__kernel void running(__global float *restrict y, __global const float *restrict x, int from_end, int outer, int length,
                      int inner) {
    FOR_EACH(i, outer * inner) {
        const long start = (long)(i / inner) * length * inner + i % inner;
        float before = 0.0f, excess = 0.0f;
        for (int first = 0; first < length; first += LONG_RUN) {
            float run = 0.0f, added = 0.0f, all = 0.0f;
            for (int k = first; k < smaller(first + LONG_RUN, length); ++k) {
                const long at = start + (long)(from_end ? length - 1 - k : k) * inner;
                run += x[at];
                added = run - excess;
                y[at] = all = before + added;
            }
            excess = all - all == 0.0f ? (all - before) - added : 0.0f;
            before = all;
        }
    }
}

__kernel void product(__global float *restrict y, __global const float *restrict x, int outer, int length, int inner) {
    FOR_EACH(i, outer * inner) {
        __global const float *from = x + (long)(i / inner) * length * inner + i % inner;
#ifdef ON_CPU
        if (inner == 1) {
            y[i] = product_of_run(from, length);
            continue;
        }
#endif
        float so_far = 1.0f;
        for (int k = 0; k < length; ++k) so_far *= from[(long)k * inner];
        y[i] = so_far;
    }
}

/* The gradient of a product: g times the product of the others, those before first, then those behind; or the whole
   product divided by each, where it is far from 0 and infinity, so that none of them is. */
__kernel void product_grad(__global float *restrict dx, __global const float *restrict g, __global const float *restrict x,
                           int outer, int length, int inner) {
    FOR_EACH(i, outer * inner) {
        const long start = (long)(i / inner) * length * inner + i % inner;
#ifdef ON_CPU
        if (inner == 1) {
            const float product = product_of_run(x + start, length), size = product < 0.0f ? -product : product;
            if (size > 1e-30f && size < 1e30f) {
                const float scaled = g[i] * product;
                for (int k = 0; k < length; ++k) dx[start + k] = scaled / x[start + k];
            } else {
                products_of_others(dx + start, x + start, g[i], length);
            }
            continue;
        }
#endif
        float before = 1.0f, behind = 1.0f;
        for (int k = 0; k < length; ++k) {
            dx[start + (long)k * inner] = before;
            before *= x[start + (long)k * inner];
        }
        for (int k = length - 1; k >= 0; --k) {
            dx[start + (long)k * inner] *= g[i] * behind;
            behind *= x[start + (long)k * inner];
        }
    }
}
