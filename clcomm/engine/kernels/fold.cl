/* The sum over ranks of one range, ((row0 + row1) + row2) + ..., times `factor` or divided by it: every byte is read
   once and written once. ROWS, 2 to 8, is the number of rows. `out` may be row 0, but no other row. */

#define ROWS_2(EACH) EACH(1)
#define ROWS_3(EACH) ROWS_2(EACH) EACH(2)
#define ROWS_4(EACH) ROWS_3(EACH) EACH(3)
#define ROWS_5(EACH) ROWS_4(EACH) EACH(4)
#define ROWS_6(EACH) ROWS_5(EACH) EACH(5)
#define ROWS_7(EACH) ROWS_6(EACH) EACH(6)
#define ROWS_8(EACH) ROWS_7(EACH) EACH(7)
#define GLUED(a, b) a##b
#define OTHER_ROWS(count, EACH) GLUED(ROWS_, count)(EACH)

#define PARAMETER(n) , __global const float *restrict row##n
#define ARGUMENT(n) , row##n
#define ARGUMENT_FROM(n) , row##n + first
#define ADD_LINE(n) total += LINE(row##n, i);
#define ADD_ONE(n) total += row##n[i];

#ifdef DIVIDES
#define SCALED(total) ((total) / factor)
#else
#define SCALED(total) ((total) * factor)
#endif

/* A cache line of floats, of any alignment. */
#define LINE_FLOATS 16
typedef float16 __attribute__((aligned(4))) line;
#define LINE(from, i) (*(__global const line *)((from) + LINE_FLOATS * (i)))

#define KEEP(value, i) *(__global line *)(out + LINE_FLOATS * (i)) = (value)
/* Non-temporal stores: otherwise each line of a result larger than the caches would be read before it is written. */
#if defined(__has_builtin) && __has_builtin(__builtin_nontemporal_store)
#define STREAM(value, i) __builtin_nontemporal_store(value, (__global float16 *)(out + LINE_FLOATS * (i)))
#else
#define STREAM(value, i) KEEP(value, i)
#endif

#define FOLD_LINES(STORE)                                    \
    _Pragma("unroll 4") for (int i = 0; i < lines; ++i) {    \
        float16 total = LINE(row0, i);                       \
        OTHER_ROWS(ROWS, ADD_LINE)                           \
        STORE(SCALED(total), i);                             \
    }

inline void fold_range(__global float *out, float factor, int streams,
                       __global const float *row0 OTHER_ROWS(ROWS, PARAMETER), int count) {
    const int lines = count / LINE_FLOATS;
    if (streams) {
        FOLD_LINES(STREAM)
    } else {
        FOLD_LINES(KEEP)
    }
    for (int i = LINE_FLOATS * lines; i < count; ++i) {
        float total = row0[i];
        OTHER_ROWS(ROWS, ADD_ONE)
        out[i] = SCALED(total);
    }
}

/* One work-item. */
__kernel void fold(__global float *out, float factor, int streams,
                   __global const float *row0 OTHER_ROWS(ROWS, PARAMETER), int count) {
    fold_range(out, factor, streams, row0 OTHER_ROWS(ROWS, ARGUMENT), count);
}

/* A whole all-reduce of ranks that share memory, by one work-item of each: the ranks meet, this one folds elements
   `first` to `last` of the rows, and they meet again. Row r is rank r's. `cells` has `stride` words for each rank: a
   counter, and from `boards` on two boards of `board_words` words, used in turn, which begin with a tag and a time.
   The words of `call` are listed in transport/fused.py. A rank that polls in vain for long returns. */

enum { TAG, ARRIVED_NS, POLLS, STATE, WAITED_NS, LAST_RANK, LATE_NS, SPARE };
enum { COMPLETE, NOT_MET, DIFFERENT, NOT_LEFT };

/* A fence of the processor, as other processes read this memory: mem_fence is none in PoCL, an atomic operation is. */
#define FENCE(call) atomic_add((__global volatile int *)((call) + SPARE), 0)

/* Whoever sees the counter sees all that was written before. */
inline void announce(__global long *call, __global volatile long *counter, long number) {
    FENCE(call);
    *counter = number;
}

inline int all_reached(__global long *call, __global const volatile long *cells, int stride, long number) {
    long polls = call[POLLS];
    for (int rank = 0; rank < ROWS; ++rank)
        while (cells[rank * stride] < number)
            if (--polls < 0) return 0;
    FENCE(call);
    return 1;
}

/* Who arrived last, how long after the one before, and how long `own` waited for it. */
inline void note_arrivals(__global long *call, __global const long *times, int stride, long own_ns) {
    long last_ns = times[0], before_ns = 0;
    int last_rank = 0;
    for (int rank = 1; rank < ROWS; ++rank) {
        const long time_ns = times[rank * stride];
        if (time_ns > last_ns) {
            before_ns = last_ns;
            last_ns = time_ns;
            last_rank = rank;
        } else if (time_ns > before_ns) {
            before_ns = time_ns;
        }
    }
    call[WAITED_NS] = last_ns - own_ns;
    call[LAST_RANK] = last_rank;
    call[LATE_NS] = last_ns - before_ns;
}

__kernel void meet_and_fold(__global long *call, __global long *cells, int stride, int boards, int board_words,
                            int rank, __global float *out, float factor, int streams,
                            __global const float *row0 OTHER_ROWS(ROWS, PARAMETER), int first, int last, int count) {
    if (!count) return;
    const long tag = call[TAG], number = cells[rank * stride] + 1;
    __global long *board = cells + boards + (number & 1) * board_words;
    board[rank * stride] = tag;
    board[rank * stride + 1] = call[ARRIVED_NS];
    announce(call, cells + rank * stride, number);
    call[STATE] = NOT_MET;
    if (!all_reached(call, cells, stride, number)) return;
    note_arrivals(call, board + 1, stride, call[ARRIVED_NS]);
    call[STATE] = DIFFERENT;
    for (int other = 0; other < ROWS; ++other)
        if (board[other * stride] != tag) return;
    fold_range(out + first, factor, streams, row0 + first OTHER_ROWS(ROWS, ARGUMENT_FROM), last - first);
    announce(call, cells + rank * stride, number + 1);
    call[STATE] = all_reached(call, cells, stride, number + 1) ? COMPLETE : NOT_LEFT;
}
