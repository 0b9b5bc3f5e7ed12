/* Samples chosen from all of a set: images[b] = pixels[chosen[b]] * scale + shift, in two rounded steps as NumPy takes
   them. `plane` pixels share a scale, and the `planes` scales repeat from image to image. The caller has checked that
   each index is from -samples to samples - 1; those below zero count from the end. */
#pragma OPENCL FP_CONTRACT OFF

/* Images lie anywhere in a set larger than the caches: without this each one's first lines are a wait for memory. */
#define LINE_BYTES 64
#define IMAGES_AHEAD 4
#define MOST_BYTES_AHEAD 1024

inline void fetch_ahead(__global const uchar *from, int bytes) {
#if defined(IN_CALLER) && defined(__has_builtin) && __has_builtin(__builtin_prefetch)
    for (int at = 0; at < min(bytes, MOST_BYTES_AHEAD); at += LINE_BYTES)
        __builtin_prefetch((const void *)(size_t)(from + at));
#endif
}

inline long start_of(int index, int samples, int bytes) { return (long)(index < 0 ? index + samples : index) * bytes; }

__kernel void gather_pixels(__global const uchar *restrict pixels, __global const int *restrict chosen,
                            __global const float *restrict scale, __global const float *restrict shift,
                            __global float *restrict images, int samples, int planes, int plane, int count) {
    FOR_ROWS(b, count) {
        const long first = start_of(chosen[b], samples, planes * plane);
        if (b + IMAGES_AHEAD < count)
            fetch_ahead(pixels + start_of(chosen[b + IMAGES_AHEAD], samples, planes * plane), planes * plane);
        for (int c = 0; c < planes; ++c) {
            __global const uchar *from = pixels + first + c * plane;
            __global float *to = images + ((long)b * planes + c) * plane;
            const float factor = scale[c], added = shift[c];
            FOR_COLUMNS(i, plane) to[i] = (float)from[i] * factor + added;
        }
    }
}
