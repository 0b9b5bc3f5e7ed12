/* The sum over ranks of one range, ((row0 + row1) + row2) + ..., times `factor` or divided by it: every byte is read
   once and written once. ROWS, 2 to 8, is the number of rows. `out` may be row 0, but no other row. IN_CALLER is
   defined where kernels run in the calling thread. ELEMENT is the type of all rows, unsigned for integers: those wrap. */

#ifndef ELEMENT
#define ELEMENT float
#endif

#define ROWS_2(EACH) EACH(1)
#define ROWS_3(EACH) ROWS_2(EACH) EACH(2)
#define ROWS_4(EACH) ROWS_3(EACH) EACH(3)
#define ROWS_5(EACH) ROWS_4(EACH) EACH(4)
#define ROWS_6(EACH) ROWS_5(EACH) EACH(5)
#define ROWS_7(EACH) ROWS_6(EACH) EACH(6)
#define ROWS_8(EACH) ROWS_7(EACH) EACH(7)
#define GLUED(a, b) a##b
#define OTHER_ROWS(count, EACH) GLUED(ROWS_, count)(EACH)

#define PARAMETER(n) , __global const ELEMENT *restrict row##n
#define ARGUMENT(n) , row##n
#define ARGUMENT_FROM(n) , row##n + first
#define ADD_LINE(n) total += LINE(row##n, i);
#define ADD_ONE(n) total += row##n[i];

#ifdef DIVIDES
#define SCALED(total) ((total) / factor)
#else
#define SCALED(total) ((total) * factor)
#endif

/* 16 elements, a cache line of floats, of any alignment. */
#define LINE_SIZE 16
#define VECTOR_OF(type) GLUED(type, 16)
typedef VECTOR_OF(ELEMENT) vector;
typedef vector __attribute__((aligned(sizeof(ELEMENT)))) line;
#define LINE(from, i) (*(__global const line *)((from) + LINE_SIZE * (i)))

#define KEEP(value, i) *(__global line *)(out + LINE_SIZE * (i)) = (value)
/* Non-temporal stores: otherwise each line of a result larger than the caches would be read before it is written. */
#if defined(__has_builtin) && __has_builtin(__builtin_nontemporal_store)
#define STREAM(value, i) __builtin_nontemporal_store(value, (__global vector *)(out + LINE_SIZE * (i)))
#else
#define STREAM(value, i) KEEP(value, i)
#endif

#define FOLD_LINES(STORE)                                    \
    _Pragma("unroll 4") for (int i = 0; i < lines; ++i) {    \
        vector total = LINE(row0, i);                       \
        OTHER_ROWS(ROWS, ADD_LINE)                           \
        STORE(SCALED(total), i);                             \
    }

inline void fold_range(__global ELEMENT *out, ELEMENT factor, int streams,
                       __global const ELEMENT *row0 OTHER_ROWS(ROWS, PARAMETER), int count) {
    const int lines = count / LINE_SIZE;
    if (streams) {
        FOLD_LINES(STREAM)
    } else {
        FOLD_LINES(KEEP)
    }
    for (int i = LINE_SIZE * lines; i < count; ++i) {
        ELEMENT total = row0[i];
        OTHER_ROWS(ROWS, ADD_ONE)
        out[i] = SCALED(total);
    }
}

/* One work-item. */
__kernel void fold(__global ELEMENT *out, ELEMENT factor, int streams,
                   __global const ELEMENT *row0 OTHER_ROWS(ROWS, PARAMETER), int count) {
    fold_range(out, factor, streams, row0 OTHER_ROWS(ROWS, ARGUMENT), count);
}

/* Whole all-reduces of ranks that share memory, by one work-item of each. Row r is rank r's. `cells` has STRIDE words for
   each rank, as transport/rendezvous.py has them: a counter, then tag and time of arrival at even rendezvous, and at odd
   ones. The words of `call` are listed in transport/fused.py. A rank that polls in vain for long returns. */

enum { TAG, ARRIVED_NS, POLLS, STATE, WAITED_NS, LAST_RANK, LATE_NS, SPARE, RANK, STRIDE, FIRST, LAST, STREAMS,
       CELLS, OUT, FACTOR, ROW_0, CLAIMS = ROW_0 + 8, MARKS, PART, RESUMES,
       POLLED, COUNT };
enum { COMPLETE, NOT_MET, DIFFERENT, NOT_LEFT, SLEEPERS };

/* A fence of the processor, as other processes read this memory: mem_fence is none in PoCL, an atomic operation is. */
#define FENCE(call) atomic_add((__global volatile int *)((call) + SPARE), 0)

/* Whoever sees a counter sees all that was written before. A fence, which the processor waits for, is not needed where
   stores and loads can have an order of their own, as they do in code for the host's processor. */
#ifdef IN_CALLER
#define PUBLISH(call, counter, number) __atomic_store_n(counter, number, __ATOMIC_RELEASE)
#define SEEN(counter) __atomic_load_n(counter, __ATOMIC_ACQUIRE)
#define AFTER_SEEING(call)
#else
#define PUBLISH(call, counter, number) (FENCE(call), *(__global volatile long *)(counter) = (number))
#define SEEN(counter) (*(__global volatile long *)(counter))
#define AFTER_SEEING(call) FENCE(call)
#endif

/* Give the core to another process, by Linux's system call sched_yield: in code for the host's processor, in the thread
   that called. */
#if defined(IN_CALLER) && defined(__linux__) && defined(__x86_64__)
inline void yield_core(void) {
    long result = 24;
    __asm__ volatile("syscall" : "+a"(result) : : "rcx", "r11", "cc", "memory");
}
#elif defined(IN_CALLER) && defined(__linux__) && defined(__aarch64__)
inline void yield_core(void) {
    register long number __asm__("x8") = 124;
    register long result __asm__("x0");
    __asm__ volatile("svc #0" : "=r"(result) : "r"(number) : "cc", "memory");
}
#else
#define NEVER_YIELDS
inline void yield_core(void) {}
#endif

/* Whether a counter reaches `number` within so many polls, between which the core is given away if `yields` says so. */
inline int reached(__global const long *counter, long number, int yields, long *polls) {
    while (SEEN(counter) < number) {
        if (--*polls < 0) return 0;
        if (yields) yield_core();
    }
    return 1;
}

/* How often to poll. Polls that should give the core away and cannot would keep it from the rank that is waited for. */
inline long polls_of(__global const long *call, int yields) {
#ifdef NEVER_YIELDS
    if (yields) return 0;
#endif
    return call[POLLS];
}

inline int all_reached(__global long *call, __global long *cells, int stride, long number, int yields) {
    long polls = polls_of(call, yields);
    for (int rank = 0; rank < ROWS; ++rank)
        if (!reached(cells + rank * stride, number, yields, &polls)) return 0;
    AFTER_SEEING(call);
    return 1;
}

/* The last rank to arrive, its delay after the one before, and this rank's wait for it. */
inline void note_arrivals(__global long *call, __global const long *times, int stride) {
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
    call[WAITED_NS] = last_ns - call[ARRIVED_NS];
    call[LAST_RANK] = last_rank;
    call[LATE_NS] = last_ns - before_ns;
}

/* Meet the other ranks as number `number`, and return how far it came: COMPLETE if all are in the same operation.
   yields: whether polls give the core away. */
inline int meet(__global long *call, __global long *cells, long number, int yields) {
    const int stride = call[STRIDE], side = 1 + 2 * (number & 1);
    const long tag = call[TAG];
    __global long *own = cells + call[RANK] * stride;
    own[side] = tag;
    own[side + 1] = call[ARRIVED_NS];
    PUBLISH(call, own, number);
    if (!all_reached(call, cells, stride, number, yields)) return NOT_MET;
    note_arrivals(call, cells + side + 1, stride);
    for (int rank = 0; rank < ROWS; ++rank)
        if (cells[rank * stride + side] != tag) return DIFFERENT;
    return COMPLETE;
}

#ifdef IN_CALLER
inline int any_asleep(__global const long *marks) {
    long asleep = 0;
    for (int rank = 0; rank < ROWS; ++rank) asleep |= SEEN(marks + rank);
    return asleep != 0;
}

/* Whether ranks sleep that wait for what this one has just published. */
inline int leaves_sleepers(__global long *call) {
    if (!call[MARKS]) return 0;
    FENCE(call); /* the counter before the marks */
    return any_asleep((__global const long *)call[MARKS]);
}
#else
inline int leaves_sleepers(__global long *call) { return 0; }
#endif

/* The ranks meet, this one folds its part of the rows, and they meet again. Sleepers are for the caller to wake. */
inline void meet_fold_leave(__global long *call, __global long *cells, __global ELEMENT *out, ELEMENT factor,
                            __global const ELEMENT *row0 OTHER_ROWS(ROWS, PARAMETER)) {
    const int stride = call[STRIDE], streams = call[STREAMS], first = call[FIRST];
    __global long *own = cells + call[RANK] * stride;
    const long number = *own + 1;
    int state = meet(call, cells, number, 0);
    const int wakes = leaves_sleepers(call); /* with its fence also where the caller is to wait, and may sleep */
    if (state == COMPLETE && wakes) state = SLEEPERS;
    call[STATE] = state;
    if (state != COMPLETE) return;
    fold_range(out + first, factor, streams, row0 + first OTHER_ROWS(ROWS, ARGUMENT_FROM), call[LAST] - first);
    if (streams) FENCE(call); /* non-temporal stores have no order */
    PUBLISH(call, own, number + 1);
    if (leaves_sleepers(call) || !all_reached(call, cells, stride, number + 1, 0)) call[STATE] = NOT_LEFT;
}

__kernel void meet_and_fold(__global long *call, __global long *cells, __global ELEMENT *out, ELEMENT factor,
                            __global const ELEMENT *row0 OTHER_ROWS(ROWS, PARAMETER), int count) {
    if (count) meet_fold_leave(call, cells, out, factor, row0 OTHER_ROWS(ROWS, ARGUMENT));
}

#ifdef IN_CALLER
/* Ranks that share cores: parts of the sum are nobody's own. Whoever runs once all have arrived takes the next part, so
   that no rank waits for the sum of another one that has no core. Two words, `claims`, count the parts taken and the
   parts summed, each beside the number of the rendezvous. */

#define PART_BITS 16
#define PARTS_OF(word) ((word) & ((1L << PART_BITS) - 1))

/* The number of parts taken before, and one more is; or `parts` if all are. */
inline int advance(__global long *word, long number, int parts) {
    long seen = __atomic_load_n(word, __ATOMIC_ACQUIRE), next;
    do {
        const int taken = seen >> PART_BITS == number ? (int)PARTS_OF(seen) : 0;
        if (taken == parts) return parts;
        next = (number << PART_BITS) + taken + 1;
    } while (!__atomic_compare_exchange_n(word, &seen, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE));
    return (int)PARTS_OF(next) - 1;
}

/* The ranks meet, and take and sum parts until none is left. It goes on where it was left if `call` says so. Sleepers
   are for the caller to wake: before the sum, which they can share, and after it. */
inline void meet_and_share(__global long *call, __global long *cells, __global ELEMENT *out, ELEMENT factor,
                           __global const ELEMENT *row0 OTHER_ROWS(ROWS, PARAMETER), int count) {
    const int part = (int)call[PART], parts = (count + part - 1) / part, streams = (int)call[STREAMS];
    __global long *claims = (__global long *)call[CLAIMS];
    __global const long *marks = (__global const long *)call[MARKS];
    long number = cells[call[RANK] * call[STRIDE]], polls = polls_of(call, 1);
    call[POLLED] = polls; /* in case it returns before the other ranks arrive */
    if (!call[RESUMES]) {
        const int state = meet(call, cells, ++number, 1);
        call[STATE] = state;
        if (state != COMPLETE) return;
        call[STATE] = SLEEPERS;
        if (leaves_sleepers(call)) return;
    }
    for (int taken = advance(claims, number, parts); taken < parts; taken = advance(claims, number, parts)) {
        const int first = taken * part;
        fold_range(out + first, factor, streams, row0 + first OTHER_ROWS(ROWS, ARGUMENT_FROM),
                   min(part, count - first));
        if (streams) FENCE(call); /* non-temporal stores have no order */
        advance(claims + 1, number, parts);
    }
    if (!reached(claims + 1, (number << PART_BITS) + parts, 1, &polls))
        call[STATE] = NOT_LEFT;
    else
        call[STATE] = any_asleep(marks) ? SLEEPERS : COMPLETE;
}

#define ADDRESSED(n) , (__global const ELEMENT *)call[ROW_0 + n]

/* The same where kernels run in the caller's address space: all else is in the words of the call. A driver looks at each
   buffer among a kernel's arguments; for small arrays that takes as long as the kernel. */
inline void fold_at(__global long *call) {
    meet_fold_leave(call, (__global long *)call[CELLS], (__global ELEMENT *)call[OUT], *(__global const ELEMENT *)(call + FACTOR),
                    (__global const ELEMENT *)call[ROW_0] OTHER_ROWS(ROWS, ADDRESSED));
}

inline void share_at(__global long *call) {
    meet_and_share(call, (__global long *)call[CELLS], (__global ELEMENT *)call[OUT], *(__global const ELEMENT *)(call + FACTOR),
                   (__global const ELEMENT *)call[ROW_0] OTHER_ROWS(ROWS, ADDRESSED), (int)call[COUNT]);
}

__kernel void meet_and_fold_at(ulong address, int count) {
    if (count) fold_at((__global long *)address);
}

__kernel void meet_and_share_at(ulong address, int count) {
    if (count) share_at((__global long *)address);
}
#endif
