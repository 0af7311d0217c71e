// The softmax cross-entropy loss, and its derivative in its place. Not for choosing a class.

#define THREADS 128

// Turns each row of scores into the derivative of its loss, and writes the loss. A block for each row; `labels` are
// columns.
extern "C" __global__ void cross_entropy(float *scores, const unsigned *labels, float *losses, int classes)
{
    __shared__ float shared[THREADS];
    float *row = scores + (long long)blockIdx.x * classes;
    const unsigned label = labels[blockIdx.x];
    const float right = row[label];

    float top = row[0];
    for (int place = threadIdx.x; place < classes; place += THREADS)
        top = fmaxf(top, row[place]);
    shared[threadIdx.x] = top;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    top = shared[0];
    __syncthreads();

    float sum = 0.0f;
    for (int place = threadIdx.x; place < classes; place += THREADS) {
        row[place] = expf(row[place] - top);
        sum += row[place];
    }
    shared[threadIdx.x] = sum;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    sum = shared[0];

    for (int place = threadIdx.x; place < classes; place += THREADS)
        row[place] = row[place] / sum - (place == (int)label ? 1.0f : 0.0f);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sum) - (right - top);
}
