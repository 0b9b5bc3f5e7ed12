/* Samples chosen from all of a set: images[b] = pixels[chosen[b]] * scale + shift, in two rounded steps as NumPy takes
   them. `plane` pixels share a scale, and the `planes` scales repeat from image to image. The caller has checked that
   each index is from -samples to samples - 1; those below zero count from the end. */
#pragma OPENCL FP_CONTRACT OFF

__kernel void gather_pixels(__global const uchar *restrict pixels, __global const int *restrict chosen,
                            __global const float *restrict scale, __global const float *restrict shift,
                            __global float *restrict images, int samples, int planes, int plane, int count) {
    FOR_ROWS(b, count) {
        const int index = chosen[b];
        const long first = (long)(index < 0 ? index + samples : index) * planes * plane;
        for (int c = 0; c < planes; ++c) {
            __global const uchar *from = pixels + first + c * plane;
            __global float *to = images + ((long)b * planes + c) * plane;
            const float factor = scale[c], added = shift[c];
            FOR_COLUMNS(i, plane) to[i] = (float)from[i] * factor + added;
        }
    }
}
