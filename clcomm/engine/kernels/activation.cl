/* ReLU, sigmoid and tanh with their gradients, as functions of the result y. NaN passes through. */

__kernel void relu(__global float *restrict y, __global const float *restrict x, int count) {
    FOR_ELEMENTS(i, count) y[i] = x[i] <= 0.0f ? 0.0f : x[i];
}

__kernel void relu_grad(__global float *restrict dx, __global const float *restrict g, __global const float *restrict y,
                        int count) {
    FOR_ELEMENTS(i, count) dx[i] = y[i] <= 0.0f ? 0.0f : g[i];
}

__kernel void sigmoid(__global float *restrict y, __global const float *restrict x, int count) {
    FOR_LANES(i, count) store_lanes(1.0f / (1.0f + exponential(-load_lanes(x + i, count - i, 0.0f))), y + i, count - i);
}

__kernel void sigmoid_grad(__global float *restrict dx, __global const float *restrict g,
                           __global const float *restrict y, int count) {
    FOR_ELEMENTS(i, count) dx[i] = g[i] * y[i] * (1.0f - y[i]);
}

/* A kernel cannot be named `tanh`, which is a built-in function. */
__kernel void hyperbolic_tangent(__global float *restrict y, __global const float *restrict x, int count) {
    FOR_LANES(i, count) {
        const lanes v = load_lanes(x + i, count - i, 0.0f), size = size_of(v), square = size * size;
        lanes sum = -0.005754786543548107f;
        sum = sum * square + 0.02068253792822361f;
        sum = sum * square - 0.05375269800424576f;
        sum = sum * square + 0.13331593573093414f;
        sum = sum * square - 0.3333328664302826f;
        const lanes small = size + size * square * sum, large = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
        const whole_lanes sign = AS_WHOLE(v) ^ AS_WHOLE(size);
        store_lanes(AS_LANES(AS_WHOLE(size < 0.62f ? small : large) ^ sign), y + i, count - i);
    }
}

__kernel void hyperbolic_tangent_grad(__global float *restrict dx, __global const float *restrict g,
                                      __global const float *restrict y, int count) {
    FOR_ELEMENTS(i, count) dx[i] = g[i] * (1.0f - y[i] * y[i]);
}
