// Multiply-adds on registers alone: CHAINS independent ones, enough to hide their latency. What a core can do at most.
#define CHAINS 12

__kernel void peak(__global float *out, const float factor, const int rounds)
{
    float8 sums[CHAINS];
    const float8 x = (float8)(factor) + (float8)(0, 1, 2, 3, 4, 5, 6, 7) * 1e-6f;
    const float8 y = (float8)(1.0f - factor);
#pragma unroll
    for (int i = 0; i < CHAINS; i++)
        sums[i] = (float8)(i * 0.1f);
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * x + y;
    }
    float8 total = (float8)(0.0f);
#pragma unroll
    for (int i = 0; i < CHAINS; i++)
        total += sums[i];
    vstore8(total, get_global_id(0), out);
}
