// Multiply-adds on registers alone: CHAINS independent ones, enough to hide their latency. What a core or a GPU can do at most.
#define CHAINS 12

#if defined(__has_attribute)
#if __has_attribute(min_vector_width)
__attribute__((min_vector_width(512))) // LLVM may cut wide vectors in two otherwise
#endif
#endif
__kernel void peak(__global VECTOR *out, const float factor, const int rounds)
{
    VECTOR sums[CHAINS];
    const VECTOR x = (VECTOR)(factor), y = (VECTOR)(1.0f - factor);
#pragma unroll
    for (int i = 0; i < CHAINS; i++)
        sums[i] = (VECTOR)(i * 0.1f);
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * x + y;
    }
    VECTOR total = (VECTOR)(0.0f);
#pragma unroll
    for (int i = 0; i < CHAINS; i++)
        total += sums[i];
    out[get_global_id(0)] = total;
}
