/* Products of a large matrix with thin factors. The matrix has `columns` columns; a factor of rank `rank` has that many
   rows in memory, so that every inner loop is over consecutive floats. */

/* thin = matrix x factor: thin[k][row] is the sum over the columns. `count` is the number of rows. */
__kernel void times(__global const float *matrix, __global const float *factor, __global float *restrict thin, int rank,
                    int columns, int count) {
    FOR_EACH(row, count) {
        __global const float *values = matrix + (size_t)row * columns;
        for (int k = 0; k < rank; ++k) {
            __global const float *weights = factor + (size_t)k * columns;
            float sum = 0;
            for (int i = 0; i < columns; ++i) sum += values[i] * weights[i];
            thin[(size_t)k * count + row] = sum;
        }
    }
}

/* thin = transposed matrix x factor: thin[k][column] is the sum over the rows. `count` is the number of columns. */
__kernel void transposed_times(__global const float *matrix, __global const float *factor,
                               __global float *restrict thin, int rank, int rows, int count) {
    for (int k = 0; k < rank; ++k) {
        __global float *restrict sums = thin + (size_t)k * count;
        FOR_ELEMENTS(i, count) sums[i] = 0;
    }
    for (int row = 0; row < rows; ++row) {
        __global const float *values = matrix + (size_t)row * count;
        for (int k = 0; k < rank; ++k) {
            __global float *restrict sums = thin + (size_t)k * count;
            const float weight = factor[(size_t)k * rows + row];
            FOR_ELEMENTS(i, count) sums[i] += values[i] * weight;
        }
    }
}

/* matrix = first x transposed second. Each product is rounded before it is added, so that all ranks get the same
   bits on any device. `count` is the number of rows. */
__kernel void outer(__global const float *first, __global const float *second, __global float *restrict matrix,
                    int rank, int columns, int count) {
    FOR_EACH(row, count) {
        __global float *restrict values = matrix + (size_t)row * columns;
        for (int i = 0; i < columns; ++i) values[i] = first[row] * second[i];
        for (int k = 1; k < rank; ++k) {
            __global const float *weights = second + (size_t)k * columns;
            const float factor = first[(size_t)k * count + row];
            for (int i = 0; i < columns; ++i) {
                const float product = factor * weights[i];
                values[i] += product;
            }
        }
    }
}
