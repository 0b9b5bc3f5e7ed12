/* partials[unit] = part of the sum, modulo 2^64, of each word mixed with its position, as in clcomm/base/host/arrays.py.
   The words are divided between `units`, on a CPU in contiguous runs. */

INLINE ulong mixed(ulong z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9UL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBUL;
    return z ^ (z >> 31);
}

__kernel void hash_words(__global ulong *restrict partials, __global const ulong *restrict words, int units,
                         int count) {
    const ulong step = 0x9E3779B97F4A7C15UL;
    FOR_EACH(unit, units) {
        ulong total = 0;
#ifdef ON_CPU
        const int length = (count + units - 1) / units;
        const int first = smaller(unit * length, count), last = smaller(first + length, count), stride = 1;
#else
        const int first = unit, last = count, stride = units;
#endif
        for (int i = first; i < last; i += stride) total += mixed(words[i] + (ulong)(i + 1) * step);
        partials[unit] = total;
    }
}
