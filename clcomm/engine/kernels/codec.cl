/* Coding and decoding of compressed gradients. */

__kernel void to_halves(__global const float *values, __global ushort *restrict halves, float divisor, int count) {
    FOR_ELEMENTS(i, count) halves[i] = (ushort)half_of(values[i] / divisor);
}

__kernel void from_halves(__global const ushort *halves, __global float *restrict values, int count) {
    FOR_ELEMENTS(i, count) values[i] = float_of(halves[i]);
}

/* The total stays a half, rounded after each row. Two halves' sum as floats is exact, or rounds as if it were. */
__kernel void add_halves(__global const ushort *halves, __global float *restrict total, int count) {
    FOR_ELEMENTS(i, count) total[i] = float_of(half_of(total[i] + float_of(halves[i])));
}

__kernel void to_bfloat16(__global const float *values, __global ushort *restrict halves, float divisor, int count) {
    FOR_ELEMENTS(i, count) halves[i] = (ushort)bfloat16_of(values[i] / divisor);
}

__kernel void from_bfloat16(__global const ushort *halves, __global float *restrict values, int count) {
    FOR_ELEMENTS(i, count) values[i] = float_of_bfloat16(halves[i]);
}

__kernel void add_bfloat16(__global const ushort *halves, __global float *restrict total, int count) {
    FOR_ELEMENTS(i, count) total[i] += float_of_bfloat16(halves[i]);
}

/* Elements are processed in blocks, so that the compiler has short loops over consecutive ones. */
#define BLOCK 256
#define BLOCKS(count) (((count) + BLOCK - 1) / BLOCK)
#define LENGTH(block, count) ((count) - BLOCK * (block) < BLOCK ? (count) - BLOCK * (block) : BLOCK)

/* A rank's row: for each block a float scale, then its elements as chars, the last block padded with zeros. The values
   to be sent include the old residual; the new one is what the coded values leave out. */
#define LARGEST_CHAR 127
/* Rounds to nearest, ties to even: between 2^23 and 2^24 floats are integers. */
#define BEYOND_FRACTIONS 12582912.0f
#define CLAMPED(number) ((number) > LARGEST_CHAR ? LARGEST_CHAR : (number) < -LARGEST_CHAR ? -LARGEST_CHAR : (number))

__kernel void to_chars(__global const float *values, __global float *restrict residuals, __global uchar *restrict rows,
                       int first, int count) {
    __global float *restrict scales = (__global float *)(rows + first);
    __global char *restrict all_numbers = (__global char *)(rows + first) + 4 * BLOCKS(count);
    FOR_EACH(block, BLOCKS(count)) {
        const int length = LENGTH(block, count);
        __global float *restrict residual = residuals + BLOCK * block;
        __global char *restrict numbers = all_numbers + BLOCK * block;
        uint largest = 0; /* bits of a magnitude; NaN is the largest */
        for (int i = 0; i < length; ++i) {
            const float wanted = values[BLOCK * block + i] + residual[i];
            const uint magnitude = as_uint(wanted) & 0x7fffffffu;
            residual[i] = wanted;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float scale = as_float(largest) / LARGEST_CHAR;
        scales[block] = scale;
        if (!IS_FINITE(scale)) { /* the mean must show it; the residual must not */
            for (int i = 0; i < length; ++i) numbers[i] = 0, residual[i] = 0;
        } else {
            const float divisor = scale > 0 ? scale : 1;
            for (int i = 0; i < length; ++i) {
                const float shifted = residual[i] / divisor + BEYOND_FRACTIONS;
                const int quotient = (int)(shifted - BEYOND_FRACTIONS), number = CLAMPED(quotient);
                const float sent = number * scale;
                numbers[i] = (char)number;
                residual[i] -= sent;
            }
        }
        for (int i = length; i < BLOCK; ++i) numbers[i] = 0;
    }
}

__kernel void mean_of_chars(__global const uchar *rows, __global float *restrict out, int ranks, int count) {
    const int row_bytes = BLOCKS(count) * (BLOCK + 4);
    FOR_EACH(block, BLOCKS(count)) {
        const int length = LENGTH(block, count);
        float total[BLOCK];
        for (int rank = 0; rank < ranks; ++rank) {
            __global const uchar *row = rows + (size_t)rank * row_bytes;
            __global const char *numbers = (__global const char *)(row + 4 * BLOCKS(count) + BLOCK * block);
            const float scale = ((__global const float *)row)[block];
            for (int i = 0; i < length; ++i) {
                const float sent = numbers[i] * scale;
                total[i] = rank ? total[i] + sent : sent;
            }
        }
        for (int i = 0; i < length; ++i) out[BLOCK * block + i] = total[i] / ranks;
    }
}

/* The `chosen` largest magnitudes: indices, then values; of equal ones the first. Their residuals become zero, the
   others' their whole values. The smallest chosen magnitude is found by its bits, 11 at a time. One work-item. */
#define DIGITS 2048
#define MAGNITUDE(value) (as_uint(value) & 0x7fffffffu)

__kernel void to_largest(__global const float *values, __global float *restrict residual, __global uchar *restrict rows,
                         int first, int chosen, int count) {
    if (count < chosen) return; /* prepared without being run */
    uint found = 0, found_bits = 0;
    int wanted_of_digit = chosen;
    for (int i = 0; i < count; ++i) residual[i] += values[i];
    for (int shift = 20; shift >= -2; shift -= 11) {
        int counts[DIGITS];
        for (int digit = 0; digit < DIGITS; ++digit) counts[digit] = 0;
        for (int i = 0; i < count; ++i) {
            const uint magnitude = MAGNITUDE(residual[i]);
            const uint digit = shift < 0 ? (magnitude << -shift) & (DIGITS - 1) : (magnitude >> shift) & (DIGITS - 1);
            if ((magnitude & found_bits) == found) ++counts[digit];
        }
        int digit = DIGITS - 1;
        for (; counts[digit] < wanted_of_digit; --digit) wanted_of_digit -= counts[digit];
        found |= shift < 0 ? (uint)digit >> -shift : (uint)digit << shift;
        found_bits |= shift < 0 ? (DIGITS - 1) >> -shift : (uint)(DIGITS - 1) << shift;
    }
    __global uint *restrict places = (__global uint *)(rows + first);
    __global float *restrict sent = (__global float *)(rows + first) + chosen;
    for (int i = 0, at = 0; i < count; ++i) {
        const float value = residual[i];
        const uint magnitude = MAGNITUDE(value);
        if (magnitude > found || (magnitude == found && wanted_of_digit-- > 0)) {
            places[at] = i;
            sent[at++] = value;
            residual[i] = 0;
        } else if (magnitude >= INFINITE) {
            residual[i] = 0;
        }
    }
}

/* `total` is as large as `out`, which other ranks may be reading: only final values go there. One work-item. */
__kernel void mean_of_largest(__global const uchar *rows, __global float *restrict out, __global float *restrict total,
                              int ranks, int chosen, int count) {
    if (count < chosen) return; /* prepared without being run: the rows are uninitialised */
    for (int i = 0; i < count; ++i) total[i] = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        __global const uint *places = (__global const uint *)(rows + (size_t)rank * 8 * chosen);
        __global const float *sent = (__global const float *)places + chosen;
        for (int k = 0; k < chosen; ++k) total[places[k]] += sent[k];
    }
    for (int i = 0; i < count; ++i) out[i] = total[i] / ranks;
}
