/* A step of a recurrent layer from a batch's states h (and c) to the next, and its gradient. CELL: 0 is tanh, 1 ReLU,
   2 LSTM, 3 GRU. `gates` are x W_ih^T + b_ih of all steps, `products` are h W_hh^T, `bias` is b_hh; `kept` are the gates
   after their functions, `before` and `cells` the states before each step. Rows that are ended at step t keep their
   state.
   Sources: Hochreiter and Schmidhuber, "Long short-term memory", 1997; Cho et al., "Learning phrase representations
   using RNN encoder-decoder for statistical machine translation", 2014. */

#include "lane_functions.cl"

#define LSTM (CELL == 2)
#define GRU (CELL == 3)
#define GATES (LSTM ? 4 : GRU ? 3 : 1)
#define KEPT (LSTM || GRU ? 4 : 1)

/* Part n of `parts`, each of `columns`: in a matrix of this step's rows, in all steps' rows. */
#define OF_ROW(from, parts, n) ((from) + ((parts)*row + (n)) * columns + i)
#define OF_STEP(from, parts, n) ((from) + ((parts) * (t * rows + row) + (n)) * columns + i)
#define READ(from) load_lanes(from, left, 0.0f)
#define WRITE(value, to) store_lanes(value, to, left)
#define HIDDEN(n) (READ(OF_ROW(products, GATES, n)) + READ(bias + (n)*columns + i))
#define GATE(n) (READ(OF_STEP(gates, GATES, n)) + HIDDEN(n))

__kernel void recurrent_step(__global float *restrict y, __global float *restrict kept, __global float *restrict before,
                             __global float *restrict cells, __global float *h, __global float *c,
                             __global const float *gates, __global const float *products, __global const float *bias,
                             __global const int *lengths, int t, int rows, int columns) {
    FOR_ROWS(row, rows) {
        const int is_ended = t >= lengths[row];
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes last = READ(OF_ROW(h, 1, 0)), none = 0.0f;
            WRITE(last, OF_STEP(before, 1, 0));
            if (is_ended) {
                WRITE(none, OF_STEP(y, 1, 0));
                continue;
            }
#if LSTM
            const lanes in = logistic(GATE(0)), forget = logistic(GATE(1)), new = tangent(GATE(2)), out = logistic(GATE(3));
            const lanes cell = READ(OF_ROW(c, 1, 0)), sum = forget * cell + in * new, next = out * tangent(sum);
            WRITE(cell, OF_STEP(cells, 1, 0));
            WRITE(sum, OF_ROW(c, 1, 0));
            WRITE(in, OF_STEP(kept, KEPT, 0));
            WRITE(forget, OF_STEP(kept, KEPT, 1));
            WRITE(new, OF_STEP(kept, KEPT, 2));
            WRITE(out, OF_STEP(kept, KEPT, 3));
#elif GRU
            const lanes reset = logistic(GATE(0)), update = logistic(GATE(1)), hidden = HIDDEN(2);
            const lanes new = tangent(READ(OF_STEP(gates, GATES, 2)) + reset * hidden);
            const lanes next = (1.0f - update) * new + update * last;
            WRITE(reset, OF_STEP(kept, KEPT, 0));
            WRITE(update, OF_STEP(kept, KEPT, 1));
            WRITE(new, OF_STEP(kept, KEPT, 2));
            WRITE(hidden, OF_STEP(kept, KEPT, 3));
#else
            const lanes sum = GATE(0), next = CELL ? (sum <= 0.0f ? none : sum) : tangent(sum);
            WRITE(next, OF_STEP(kept, KEPT, 0));
#endif
            WRITE(next, OF_ROW(h, 1, 0));
            WRITE(next, OF_STEP(y, 1, 0));
        }
    }
}

/* One gate's gradient: for all steps, and for the next product. The GRU's has another for `products`. */
#if GRU
#define WRITE_GRADIENT(n, value, hidden) \
    WRITE(value, OF_STEP(dgates, GATES, n)), WRITE(hidden, OF_STEP(dhidden, GATES, n)), WRITE(hidden, OF_ROW(step, GATES, n))
#else
#define WRITE_GRADIENT(n, value, hidden) WRITE(value, OF_STEP(dgates, GATES, n)), WRITE(value, OF_ROW(step, GATES, n))
#endif

/* dh and dc are the states' gradients from later steps, but for `products`, the part through their W_hh. */
__kernel void recurrent_gradient(__global float *restrict dgates, __global float *restrict dhidden,
                                 __global float *restrict step, __global float *dh, __global float *dc,
                                 __global const float *g, __global const float *kept, __global const float *before,
                                 __global const float *cells, __global const float *products,
                                 __global const int *lengths, int t, int rows, int columns) {
    FOR_ROWS(row, rows) {
        const int is_ended = t >= lengths[row];
        FOR_COLUMN_LANES(i, columns) {
            const int left = columns - i;
            const lanes later = READ(OF_ROW(dh, 1, 0)) + READ(OF_ROW(products, 1, 0)), none = 0.0f;
            if (is_ended) {
                WRITE(later, OF_ROW(dh, 1, 0));
                for (int n = 0; n < GATES; ++n) WRITE_GRADIENT(n, none, none);
                continue;
            }
            const lanes d = later + READ(OF_STEP(g, 1, 0));
#if LSTM
            const lanes in = READ(OF_STEP(kept, KEPT, 0)), forget = READ(OF_STEP(kept, KEPT, 1));
            const lanes new = READ(OF_STEP(kept, KEPT, 2)), out = READ(OF_STEP(kept, KEPT, 3));
            const lanes cell = READ(OF_STEP(cells, 1, 0)), bent = tangent(forget * cell + in * new);
            const lanes dsum = READ(OF_ROW(dc, 1, 0)) + d * out * (1.0f - bent * bent);
            WRITE_GRADIENT(0, dsum * new * in * (1.0f - in), none);
            WRITE_GRADIENT(1, dsum * cell * forget * (1.0f - forget), none);
            WRITE_GRADIENT(2, dsum * in * (1.0f - new * new), none);
            WRITE_GRADIENT(3, d * bent * out * (1.0f - out), none);
            WRITE(dsum * forget, OF_ROW(dc, 1, 0));
            WRITE(none, OF_ROW(dh, 1, 0));
#elif GRU
            const lanes reset = READ(OF_STEP(kept, KEPT, 0)), update = READ(OF_STEP(kept, KEPT, 1));
            const lanes new = READ(OF_STEP(kept, KEPT, 2)), hidden = READ(OF_STEP(kept, KEPT, 3));
            const lanes dnew = d * (1.0f - update) * (1.0f - new * new), dreset = dnew * hidden * reset * (1.0f - reset);
            const lanes dupdate = d * (READ(OF_STEP(before, 1, 0)) - new) * update * (1.0f - update);
            WRITE_GRADIENT(0, dreset, dreset);
            WRITE_GRADIENT(1, dupdate, dupdate);
            WRITE_GRADIENT(2, dnew, dnew * reset);
            WRITE(d * update, OF_ROW(dh, 1, 0));
#else
            const lanes next = READ(OF_STEP(kept, KEPT, 0));
            const lanes dsum = CELL ? (next <= 0.0f ? none : d) : d * (1.0f - next * next);
            WRITE_GRADIENT(0, dsum, none);
            WRITE(none, OF_ROW(dh, 1, 0));
#endif
        }
    }
}
