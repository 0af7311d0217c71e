// What tensor cores take and give, and how numbers come to them: one function for each instruction of PTX. The host puts
// this file, after `bf16.cu`, before `attention_bf16.cu`. On CPUs the driver's double has functions of these names
// instead.
//
// A warp multiplies together. Each of its threads, `lane`, holds a part of each matrix: with group = lane / 4 and
// pair = lane % 4 * 2,
//
//   left    16 rows, 16 columns  at[0] (group, pair)      at[1] (group + 8, pair)
//                                at[2] (group, pair + 8)  at[3] (group + 8, pair + 8)
//   right   16 rows,  8 columns  at[0] (pair, group)      at[1] (pair + 8, group)
//   sums    16 rows,  8 columns  at[0], at[1] (group, pair), at[2], at[3] (group + 8, pair)
//
// where each of left and right is two neighbours of a row (of a column for right), the first in the lower half (PTX ISA
// 8.7, 9.7.14.5.8, "Matrix Fragments for mma.m16n8k16 with floating point type"). All threads of a warp must come here.

// GPUs before this one have no tensor cores for bf16, and the host does not start these kernels there.
#if __CUDA_ARCH__ >= 800

// Adds left · right to the sums.
static __device__ void multiply_add(float (&sums)[4], const unsigned (&left)[4], unsigned right, unsigned right_below)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"(right_below));
}

static __device__ unsigned shared_address(const void *place)
{
    return (unsigned)__cvta_generic_to_shared(place);
}

// Reads four matrices of 8 by 8. Thread i names the row i % 8 of matrix i / 8, in shared memory, at a multiple of 16
// bytes. Of each matrix a thread gets (group, pair) and the number after it (PTX ISA 8.7, 9.7.14.5.15, "ldmatrix").
static __device__ void load_matrices(unsigned (&out)[4], const Bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// As `load_matrices`, of transposed matrices: a thread gets (pair, group) and the number below it.
static __device__ void load_transposed(unsigned (&out)[4], const Bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Begins to copy BYTES (4 or 16) to shared memory; if they are not `there`, zeros, and nothing is read. Both addresses
// are multiples of BYTES (PTX ISA 8.7, 9.7.9.25.3.1, "cp.async").
template <int BYTES> static __device__ void begin_copy(void *shared, const void *from, bool there)
{
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(from),
                     "n"(BYTES), "r"(there ? BYTES : 0)
                     : "memory");
}

// Waits for all copies that this thread has begun. Other threads may read them after a barrier.
static __device__ void wait_for_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Both numbers rounded to the nearest bf16, ties to even, the first in the lower half.
static __device__ unsigned rounded_pair(float first, float second)
{
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// 2 to this power; zero instead of subnormal numbers.
static __device__ float power_of_two(float exponent)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

#else

static __device__ void multiply_add(float (&)[4], const unsigned (&)[4], unsigned, unsigned) { __trap(); }
static __device__ void load_matrices(unsigned (&)[4], const Bf16 *) { __trap(); }
static __device__ void load_transposed(unsigned (&)[4], const Bf16 *) { __trap(); }
template <int BYTES> static __device__ void begin_copy(void *, const void *, bool) { __trap(); }
static __device__ void wait_for_copies() { __trap(); }
static __device__ unsigned rounded_pair(float, float) { return __trap(), 0; }
static __device__ float power_of_two(float) { return __trap(), 0.0f; }

#endif
