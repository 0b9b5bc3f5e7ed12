/* Declarations of the OpenCL C functions that these kernels use. PoCL 3 reads a header of 1 MB with all functions
   before each program, which takes longer than the program itself; program.py replaces it by this file where possible.
   A function that is missing here brings the header back, and a test fails. */
#define READS_NOTHING __attribute__((overloadable, const))
#define READS __attribute__((overloadable, pure))
#define WRITES __attribute__((overloadable))

size_t READS_NOTHING get_global_id(uint);
size_t READS_NOTHING get_global_size(uint);
size_t READS_NOTHING get_group_id(uint);
size_t READS_NOTHING get_num_groups(uint);
size_t READS_NOTHING get_local_id(uint);
size_t READS_NOTHING get_local_size(uint);
void __attribute__((overloadable, convergent)) barrier(cl_mem_fence_flags);

#define DECLARE_MATH(REAL, WHOLE)       \
    REAL READS_NOTHING exp(REAL);       \
    REAL READS_NOTHING log(REAL);       \
    REAL READS_NOTHING sqrt(REAL);      \
    REAL READS_NOTHING sin(REAL);       \
    REAL READS_NOTHING cos(REAL);       \
    REAL READS_NOTHING pow(REAL, REAL); \
    REAL READS_NOTHING log1p(REAL);     \
    REAL READS_NOTHING expm1(REAL);     \
    REAL READS_NOTHING asin(REAL);      \
    REAL READS_NOTHING acos(REAL);      \
    REAL READS_NOTHING atan(REAL);      \
    REAL READS_NOTHING atan2(REAL, REAL); \
    REAL READS_NOTHING hypot(REAL, REAL); \
    REAL READS_NOTHING floor(REAL);     \
    REAL READS_NOTHING ceil(REAL);      \
    REAL READS_NOTHING rint(REAL);      \
    REAL READS_NOTHING trunc(REAL);     \
    REAL READS_NOTHING fmod(REAL, REAL); \
    REAL READS_NOTHING fabs(REAL);      \
    REAL READS_NOTHING fmin(REAL, REAL); \
    REAL READS_NOTHING fmax(REAL, REAL); \
    REAL READS_NOTHING fma(REAL, REAL, REAL); \
    WHOLE READS_NOTHING isnan(REAL);
DECLARE_MATH(float, int)
DECLARE_MATH(float4, int4)
DECLARE_MATH(float8, int8)

#define DECLARE_WHOLE(WHOLE)             \
    WHOLE READS_NOTHING min(WHOLE, WHOLE); \
    WHOLE READS_NOTHING max(WHOLE, WHOLE);
DECLARE_WHOLE(int)
DECLARE_WHOLE(uint)
DECLARE_WHOLE(long)
DECLARE_WHOLE(ulong)

float4 READS vload4(size_t, const __global float *);

#define DECLARE_MEMORY(SPACE)                     \
    float8 READS vload8(size_t, const SPACE float *); \
    void WRITES vstore8(float8, size_t, SPACE float *);
DECLARE_MEMORY(__global)
DECLARE_MEMORY(__local)
DECLARE_MEMORY(__private)

int WRITES atomic_add(volatile __global int *, int);

int8 READS_NOTHING convert_int8(uchar8);
float8 READS_NOTHING convert_float8(uchar8);
uchar8 READS_NOTHING convert_uchar8(int8);
