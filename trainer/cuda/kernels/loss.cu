// The softmax cross-entropy loss, and its derivative, which replaces the scores.

#define THREADS 256
// For a row in bf16. Few blocks are at work at once then, and their rows are still in the GPU's cache when they are read
// again.
#define MANY 1024

#define LOG2E 1.44269504f

// The largest score so far is subtracted before the powers are summed, and the sum is scaled down when a larger one comes
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). So a row is read only twice.
static __device__ void take(float score, float &top, float &sum)
{
    if (score > top) {
        sum *= expf(top - score);
        top = score;
    }
    sum += expf(score - top);
}

// What all threads of the block have taken, which are a power of two.
template <unsigned COUNT> static __device__ void gather(float &top, float &sum)
{
    __shared__ float tops[COUNT], sums[COUNT];
    tops[threadIdx.x] = top;
    sums[threadIdx.x] = sum;
    for (unsigned half = COUNT / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const float other = tops[threadIdx.x + half], least = fminf(tops[threadIdx.x], other);
            const float most = fmaxf(tops[threadIdx.x], other), shrink = expf(least - most);
            const bool own = tops[threadIdx.x] == most;
            sums[threadIdx.x] = own ? sums[threadIdx.x] + sums[threadIdx.x + half] * shrink
                                    : sums[threadIdx.x] * shrink + sums[threadIdx.x + half];
            tops[threadIdx.x] = most;
        }
    }
    __syncthreads();
    top = tops[0];
    sum = sums[0];
}

// Turns each row of scores into the derivative of its loss, and writes the loss. There is a block for each row, so that
// a row may be wide; `labels` are columns.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy(float *scores, const unsigned *labels, float *losses, int classes)
{
    float *row = scores + (long long)blockIdx.x * classes;
    const unsigned label = labels[blockIdx.x];
    const float right = row[label];

    float top = row[0], sum = 0.0f;
#pragma unroll 4
    for (int place = threadIdx.x; place < classes; place += THREADS)
        take(row[place], top, sum);
    gather<THREADS>(top, sum);

#pragma unroll 4
    for (int place = threadIdx.x; place < classes; place += THREADS)
        row[place] = expf(row[place] - top) / sum - (place == (int)label ? 1.0f : 0.0f);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sum) - (right - top);
}

// e to the power of what a score is above the largest, by way of 2 to a power: one instruction on a GPU, which gives zero
// instead of subnormal numbers.
static __device__ float power(float score, float top)
{
    const float exponent = (score - top) * LOG2E;
#ifdef __CUDA_ARCH__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
#else
    return exp2f(exponent);
#endif
}

// Four scores of a row. What is behind the classes is below all numbers, so that its power is zero.
static __device__ Four scores_of(const Bf16 *row, int place, int classes, int padded)
{
    Four here = four(row, place, padded, true);
    // For nearly all threads one comparison, in place of four.
    if (place + 4 > classes) {
        Bits nothing;
        nothing.bits = 0xff800000u;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (place + i >= classes)
                here.at[i] = nothing.value;
    }
    return here;
}

// The same of scores in bf16, in rows of `padded` numbers, a multiple of four. What is behind the classes is no class:
// it counts for nothing, whatever it is, and becomes zero.
extern "C" __global__ void __launch_bounds__(MANY, 2)
cross_entropy_bf16(Bf16 *scores, const unsigned *labels, float *losses, int classes, int padded)
{
    Bf16 *row = scores + (long long)blockIdx.x * padded;
    const int label = (int)labels[blockIdx.x];
    const float right = widened(row[label]);

    float top = widened(row[0]), sum = 0.0f;
#pragma unroll 4
    for (int place = threadIdx.x * 4; place < classes; place += 4 * MANY) {
        const Four here = scores_of(row, place, classes, padded);
        const float most = fmaxf(fmaxf(fmaxf(here.at[0], here.at[1]), fmaxf(here.at[2], here.at[3])), top);
        if (most > top) {
            sum *= power(top, most);
            top = most;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum += power(here.at[i], top);
    }
    gather<MANY>(top, sum);

    const float share = 1.0f / sum;
#pragma unroll 4
    for (int place = threadIdx.x * 4; place < padded; place += 4 * MANY) {
        Four here = scores_of(row, place, classes, padded);
#pragma unroll
        for (int i = 0; i < 4; i++)
            here.at[i] = power(here.at[i], top) * share;
        if (place == (label & ~3))
#pragma unroll
            for (int i = 0; i < 4; i++)
                here.at[i] -= place + i == label ? 1.0f : 0.0f;
        put(row, place, padded, true, here);
    }
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sum) - (right - top);
}
