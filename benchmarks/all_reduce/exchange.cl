/* Each of two ranks writes its cache line and waits for the other's: the least that ranks need to learn each other's
   values. `volatile` keeps both accesses in the loop; x86 and ARM make a store visible without a fence. */
__kernel void exchange(__global volatile int *mine, __global const volatile int *other, int begin, int rounds)
{
    for (int round = begin + 1; round <= begin + rounds; round++) {
        *mine = round;
        while (*other < round)
            ;
    }
}
