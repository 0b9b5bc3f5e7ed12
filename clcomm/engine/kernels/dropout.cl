/* Dropout by counters: element i is kept if the word of random bits that belongs to it is at least `threshold`. A word
   depends on the ticket and on i alone, so the mask is the same on any device, and backward computes it again.
   Philox4x32-10 makes four words of a block's number: of 32 neighbouring elements, i % 8 is the block and i / 8 the word.
   Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. */

/* Of the stream's state, and of a ticket, which is a copy of it. */
enum { KEY_LOW, KEY_HIGH, RANK, DRAWS_LOW, DRAWS_HIGH, STATE_WORDS };
#define GROUP_OF_BLOCKS 8
#define GROUP_OF_ELEMENTS 32

/* Copies the state to a ticket and advances the state by one draw. */
__kernel void draw_ticket(__global uint *restrict ticket, __global uint *restrict state) {
    if (get_global_id(0) == 0) {
        for (int i = 0; i < STATE_WORDS; ++i) ticket[i] = state[i];
        state[DRAWS_LOW] += 1;
        if (state[DRAWS_LOW] == 0) state[DRAWS_HIGH] += 1;
    }
}

#ifdef ON_CPU
typedef ulong8 wide; /* of GROUP_OF_BLOCKS blocks */
#else
typedef ulong wide;
#endif
#define LOW_32 0xFFFFFFFFul

/* The four words of blocks, 32 bits of each lane; counter[0] is the block's number. */
INLINE void philox(wide counter[4], uint key_low, uint key_high) {
    for (int round = 0; round < 10; ++round) {
        const wide first = (counter[0] & LOW_32) * 0xD2511F53ul, second = (counter[2] & LOW_32) * 0xCD9E8D57ul;
        counter[0] = (second >> 32) ^ counter[1] ^ (wide)(ulong)key_low;
        counter[1] = second & LOW_32;
        counter[2] = (first >> 32) ^ counter[3] ^ (wide)(ulong)key_high;
        counter[3] = first & LOW_32;
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
}

INLINE void words_of(wide words[4], wide block, __global const uint *ticket) {
    words[0] = block;
    words[1] = (ulong)ticket[DRAWS_LOW];
    words[2] = (ulong)ticket[DRAWS_HIGH];
    words[3] = (ulong)ticket[RANK];
    philox(words, ticket[KEY_LOW], ticket[KEY_HIGH]);
}

/* y = x * scale where an element is kept, else x * 0; `groups` of GROUP_OF_ELEMENTS elements. */
__kernel void dropout(__global float *restrict y, __global const float *restrict x, __global const uint *restrict ticket,
                      uint threshold, float scale, int count, int groups) {
    wide words[4];
#ifdef ON_CPU
    FOR_EACH(group, groups) {
        words_of(words, (ulong)(GROUP_OF_BLOCKS * group) + (wide)(0, 1, 2, 3, 4, 5, 6, 7), ticket);
        for (int word = 0; word < 4; ++word) {
            const int i = GROUP_OF_ELEMENTS * group + GROUP_OF_BLOCKS * word, left = count - i;
            const wide is_dropped = (words[word] - (wide)(ulong)threshold) >> 63; /* 1 where the difference is negative */
            const int8 is_kept = 1 - __builtin_convertvector(is_dropped, int8);
            const lanes factor = scale * __builtin_convertvector(is_kept, lanes);
            if (left > 0) store_lanes(load_lanes(x + i, left, 0.0f) * factor, y + i, left);
        }
    }
#else
    FOR_EACH(block, GROUP_OF_BLOCKS * groups) {
        words_of(words, (wide)block, ticket);
        for (int word = 0; word < 4; ++word) {
            const int i = block / GROUP_OF_BLOCKS * GROUP_OF_ELEMENTS + GROUP_OF_BLOCKS * word + block % GROUP_OF_BLOCKS;
            if (i < count) y[i] = x[i] * (words[word] >= threshold ? scale : 0.0f);
        }
    }
#endif
}
