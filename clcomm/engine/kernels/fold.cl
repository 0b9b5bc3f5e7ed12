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

/* One work-item. */
__kernel void fold(__global float *out, float factor, int streams,
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
