/* Parameters stored in 16 bits: fp16 with FP16, else bf16. */

#ifdef FP16
#define STORED_OF(value) half_of(value)
#define VALUE_OF(bits) float_of(bits)
#else
#define STORED_OF(value) bfloat16_of(value)
#define VALUE_OF(bits) float_of_bfloat16(bits)
#endif

/* Values, from the elements that begin at `first`. */
__kernel void expand(__global const ushort *restrict stored, __global float *restrict values, int first, int count) {
    stored += first;
    FOR_ELEMENTS(i, count) values[i] = VALUE_OF(stored[i]);
}

/* Elements from `first` on, from values that begin at `first_value`, rounded. */
__kernel void narrow(__global ushort *restrict stored, __global const float *restrict values, int first,
                     int first_value, int count) {
    stored += first, values += first_value;
    FOR_ELEMENTS(i, count) stored[i] = (ushort)STORED_OF(values[i]);
}

/* Masters that do not round to the stored value take it: something else than the optimizer has written it. */
__kernel void reconcile(__global const ushort *restrict stored, __global float *restrict masters, int first,
                        int first_master, int count) {
    stored += first, masters += first_master;
    FOR_ELEMENTS(i, count) {
        const uint bits = stored[i];
        const float master = masters[i];
        masters[i] = STORED_OF(master) == bits ? master : VALUE_OF(bits);
    }
}
