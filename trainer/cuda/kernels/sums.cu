// Sums without atomics: the order of each is the same on every device.

#define THREADS 256

// The sum of all threads' values, halves added to halves; thread 0 gets it. `shared` has room for each thread.
template <class Number> static __device__ Number sum_of_block(Number value, Number *shared)
{
    shared[threadIdx.x] = value;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    return shared[0];
}

// Adds `more` to `sum`, place by place.
extern "C" __global__ void add(float *sum, const float *more, long long count)
{
    const long long place = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (place < count)
        sum[place] += more[place];
}

// Writes the sum of all rows: the derivative of a bias. A thread adds a column from top to bottom.
extern "C" __global__ void sum_rows(float *sum, const float *numbers, int rows, int columns)
{
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= columns)
        return;
    float total = 0.0f;
    // A thread waits once for so many numbers.
#pragma unroll 16
    for (int row = 0; row < rows; row++)
        total += numbers[(long long)row * columns + column];
    sum[column] = total;
}

// Writes the sum of all numbers. For one block.
extern "C" __global__ void sum_all(float *sum, const float *numbers, int count)
{
    __shared__ float shared[THREADS];
    float total = 0.0f;
    for (int place = threadIdx.x; place < count; place += THREADS)
        total += numbers[place];
    total = sum_of_block(total, shared);
    if (threadIdx.x == 0)
        sum[0] = total;
}

// Writes a sum for each block of all numbers' bits, each mixed with its place (see `mix` in trainer/src/random.rs). The
// sums of all blocks together are the same for any number of blocks, since additions of whole numbers have no order.
extern "C" __global__ void sum_bits(unsigned long long *sums, const unsigned *numbers, long long count)
{
    __shared__ unsigned long long shared[THREADS];
    unsigned long long total = 0;
    for (long long place = (long long)blockIdx.x * THREADS + threadIdx.x; place < count;
         place += (long long)gridDim.x * THREADS) {
        unsigned long long bits = (unsigned long long)place * 0x9e3779b97f4a7c15ULL + numbers[place];
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
        total += bits ^ (bits >> 31);
    }
    total = sum_of_block(total, shared);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = total;
}

// Writes a sum of squares for each block; together they give the square of the Euclidean norm. It is computed in f64,
// where the square of every f32 is exact and finite.
extern "C" __global__ void sum_squares(double *sums, const float *numbers, long long count)
{
    __shared__ double shared[THREADS];
    double total = 0.0;
    for (long long place = (long long)blockIdx.x * THREADS + threadIdx.x; place < count;
         place += (long long)gridDim.x * THREADS)
        total += (double)numbers[place] * (double)numbers[place];
    total = sum_of_block(total, shared);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = total;
}
