/* The all-reduces of fold.cl as functions that Python calls by itself, since a driver's launch takes longer than the sum
   of a few KiB. They are a PyCFunction each: `self` is a NumPy array that holds the words of the call, whose address lies
   DATA bytes behind the object's begin; they return it, as a new reference. The caller holds the interpreter's lock. */

#include "fold.cl"

#define CALLED __attribute__((used, noinline, visibility("hidden"))) ulong
#define CALL_OF(self) (*(__global long *__global *)((self) + DATA))
#define NEW_REFERENCE(self) (++*(__global int *)(self), (self))

CALLED called_fold(ulong self, ulong unused) {
    fold_at(CALL_OF(self));
    return NEW_REFERENCE(self);
}

CALLED called_share(ulong self, ulong unused) {
    share_at(CALL_OF(self));
    return NEW_REFERENCE(self);
}

/* OpenCL C has no address of a function. */
#define ADDRESS_OF(function, to) __asm__ volatile("leaq " #function "(%%rip), %0" : "=r"(to))

__kernel void addresses(__global ulong *to, int count) {
    ulong fold_address, share_address;
    ADDRESS_OF(called_fold, fold_address);
    ADDRESS_OF(called_share, share_address);
    if (count) {
        to[0] = fold_address;
        to[1] = share_address;
    }
    /* Compilers drop functions that no kernel calls. */
    if (count > 2) to[2] = called_fold(to[0], 0) + called_share(to[1], 0);
}
