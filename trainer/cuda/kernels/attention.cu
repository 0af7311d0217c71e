// Causal attention of several heads, forward and backward. No matrix of all pairs is stored: a tile of scores is
// computed, used and dropped (Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
// 2023).
//
// A row of `triples` holds the queries of all heads, then their keys, then their values. A row of the outputs holds the
// outputs of all heads. `logs` keeps, for each head of each sequence and each row, the logarithm to base 2 of the sum
// that the softmax divides by: the backward pass computes the weights again from it. A block has one head of one
// sequence and a tile of its rows. No other block writes these rows, so there are no atomics, and a row's bits depend
// only on the rows that it attends to.
//
// Eight neighbouring threads share a row of a tile, so that a row's data stay within one warp. A thread has every 16th
// row, every 8th column of the scores, and every 8th group of four of a head's columns.

#define THREADS 128
#define LANES 8
#define GROUPS (THREADS / LANES)

// Fills a tile with rows that are `stride` numbers apart. Only `left` of them exist; the rest of the tile becomes zero.
template <int ROWS, int DEPTH>
static __device__ void load(float (*tile)[DEPTH + 4], const float *from, int stride, int left, Shape shape)
{
    const bool whole = aligned(from, shape.columns);
    for (int place = threadIdx.x; place < ROWS * (DEPTH / 4); place += THREADS) {
        const int row = place / (DEPTH / 4), column = place % (DEPTH / 4) * 4;
        Four numbers = {};
        if (row < left)
            numbers = four(from + (long long)row * stride, column, shape.columns, whole);
        *(Four *)&tile[row][column] = numbers;
    }
}

// Fills a tile with keys and one with values: those of rows from `first` on.
template <int ROWS, int DEPTH>
static __device__ void load_keys_and_values(float (*keys)[DEPTH + 4], float (*values)[DEPTH + 4], const float *triples,
                                            int first, Shape shape)
{
    const int stride = 3 * shape.width();
    const float *here = triples + (long long)first * stride + shape.width();
    load<ROWS, DEPTH>(keys, here, stride, shape.time - first, shape);
    load<ROWS, DEPTH>(values, here + shape.width(), stride, shape.time - first, shape);
}

// Writes the dot products of the thread's rows of `left` with its rows of `right`.
template <int ROWS, int COLUMNS, int DEPTH>
static __device__ void multiply(float (&out)[ROWS / GROUPS][COLUMNS / LANES], const float (*left)[DEPTH + 4],
                                const float (*right)[DEPTH + 4])
{
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < ROWS / GROUPS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS / LANES; j++)
            out[i][j] = 0.0f;
#pragma unroll 4
    for (int depth = 0; depth < DEPTH; depth += 4) {
        Four lefts[ROWS / GROUPS], rights[COLUMNS / LANES];
#pragma unroll
        for (int i = 0; i < ROWS / GROUPS; i++)
            lefts[i] = *(const Four *)&left[group + i * GROUPS][depth];
#pragma unroll
        for (int j = 0; j < COLUMNS / LANES; j++)
            rights[j] = *(const Four *)&right[lane + j * LANES][depth];
#pragma unroll
        for (int i = 0; i < ROWS / GROUPS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; j++)
#pragma unroll
                for (int d = 0; d < 4; d++)
                    out[i][j] += lefts[i].at[d] * rights[j].at[d];
    }
}

// Adds to the thread's rows the rows of `right`, each times its weight.
template <int ROWS, int COLUMNS, int DEPTH>
static __device__ void add_weighted(float (&sums)[ROWS / GROUPS][DEPTH / LANES], const float (*weights)[COLUMNS + 4],
                                    const float (*right)[DEPTH + 4])
{
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll 2
    for (int column = 0; column < COLUMNS; column += 4) {
        Four shares[ROWS / GROUPS];
#pragma unroll
        for (int i = 0; i < ROWS / GROUPS; i++)
            shares[i] = *(const Four *)&weights[group + i * GROUPS][column];
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int part = 0; part < DEPTH / LANES; part += 4) {
                const Four numbers = *(const Four *)&right[column + c][part * LANES + lane * 4];
#pragma unroll
                for (int i = 0; i < ROWS / GROUPS; i++)
#pragma unroll
                    for (int d = 0; d < 4; d++)
                        sums[i][part + d] += shares[i].at[c] * numbers.at[d];
            }
    }
}

// Writes the thread's part of its rows, each times its factor. Only `left` rows of the tile exist.
template <int ROWS, int DEPTH>
static __device__ void store(float *to, int stride, int left, Shape shape,
                             const float (&sums)[ROWS / GROUPS][DEPTH / LANES], const float (&factors)[ROWS / GROUPS])
{
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const bool whole = aligned(to, shape.columns);
#pragma unroll
    for (int i = 0; i < ROWS / GROUPS; i++) {
        const int row = group + i * GROUPS;
        if (row >= left)
            continue;
#pragma unroll
        for (int part = 0; part < DEPTH / LANES; part += 4) {
            Four numbers;
#pragma unroll
            for (int d = 0; d < 4; d++)
                numbers.at[d] = sums[i][part + d] * factors[i];
            put(to + (long long)row * stride, part * LANES + lane * 4, shape.columns, whole, numbers);
        }
    }
}

static __device__ float sum_of_lanes(float value)
{
#pragma unroll
    for (int flips = LANES / 2; flips > 0; flips /= 2)
        value += __shfl_xor_sync(0xffffffff, value, flips);
    return value;
}

static __device__ float largest_of_lanes(float value)
{
#pragma unroll
    for (int flips = LANES / 2; flips > 0; flips /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, flips));
    return value;
}

// The outputs for ROWS queries, COLUMNS keys at a time. The largest score so far is subtracted from all scores, and the
// sums so far are scaled down when a larger one comes.
template <int DEPTH, int ROWS, int COLUMNS>
static __device__ void attend(float *__restrict__ outputs, float *__restrict__ logs, const float *__restrict__ triples,
                              Shape shape)
{
    __shared__ __align__(16) float queries[ROWS][DEPTH + 4];
    __shared__ __align__(16) float keys[COLUMNS][DEPTH + 4];
    __shared__ __align__(16) float values[COLUMNS][DEPTH + 4];
    __shared__ __align__(16) float weights[ROWS][COLUMNS + 4];
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // The blocks whose rows attend to most keys begin first.
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS, left = shape.time - first;
    const int stride = 3 * shape.width(), seen = min(first + ROWS, shape.time);
    const float factor = LOG2_E / sqrtf((float)shape.columns);
    triples += shape.triple();
    load<ROWS, DEPTH>(queries, triples + (long long)first * stride, stride, left, shape);

    float tops[ROWS / GROUPS], totals[ROWS / GROUPS], sums[ROWS / GROUPS][DEPTH / LANES];
#pragma unroll
    for (int i = 0; i < ROWS / GROUPS; i++) {
        tops[i] = UNSEEN;
        totals[i] = 0.0f;
#pragma unroll
        for (int d = 0; d < DEPTH / LANES; d++)
            sums[i][d] = 0.0f;
    }
    for (int key = 0; key < seen; key += COLUMNS) {
        __syncthreads();
        load_keys_and_values<COLUMNS, DEPTH>(keys, values, triples, key, shape);
        __syncthreads();
        float scores[ROWS / GROUPS][COLUMNS / LANES];
        multiply<ROWS, COLUMNS, DEPTH>(scores, queries, keys);
#pragma unroll
        for (int i = 0; i < ROWS / GROUPS; i++) {
            const int row = group + i * GROUPS;
            float top = tops[i];
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; j++) {
                scores[i][j] = key + lane + j * LANES <= first + row ? scores[i][j] * factor : UNSEEN;
                top = fmaxf(top, scores[i][j]);
            }
            top = largest_of_lanes(top);
            const float shrink = exp2f(tops[i] - top);
            tops[i] = top;
            totals[i] *= shrink;
#pragma unroll
            for (int d = 0; d < DEPTH / LANES; d++)
                sums[i][d] *= shrink;
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; j++) {
                const float weight = exp2f(scores[i][j] - top);
                totals[i] += weight;
                weights[row][lane + j * LANES] = weight;
            }
        }
        __syncwarp();
        add_weighted<ROWS, COLUMNS, DEPTH>(sums, weights, values);
    }

    float shares[ROWS / GROUPS];
#pragma unroll
    for (int i = 0; i < ROWS / GROUPS; i++) {
        const float total = sum_of_lanes(totals[i]);
        shares[i] = 1.0f / total;
        if (lane == 0 && group + i * GROUPS < left)
            logs[shape.log() + first + group + i * GROUPS] = tops[i] + log2f(total);
    }
    outputs += shape.single() + (long long)first * shape.width();
    store<ROWS, DEPTH>(outputs, shape.width(), left, shape, sums, shares);
}

// The derivative by ROWS queries, COLUMNS keys at a time. Writes into `means`, for each of these rows, the dot product
// of the outputs with the derivative by the outputs: the mean, by the softmax's weights, of the derivative by the
// weights.
template <int DEPTH, int ROWS, int COLUMNS>
static __device__ void attend_queries(float *__restrict__ slopes, float *__restrict__ means,
                                      const float *__restrict__ triples, const float *__restrict__ outputs,
                                      const float *__restrict__ output_slopes, const float *__restrict__ logs,
                                      Shape shape)
{
    __shared__ __align__(16) float queries[ROWS][DEPTH + 4];
    __shared__ __align__(16) float above[ROWS][DEPTH + 4];
    __shared__ __align__(16) float keys[COLUMNS][DEPTH + 4];
    __shared__ __align__(16) float values[COLUMNS][DEPTH + 4];
    __shared__ __align__(16) float weights[ROWS][COLUMNS + 4];
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS, left = shape.time - first;
    const int stride = 3 * shape.width(), seen = min(first + ROWS, shape.time);
    const float scale = 1.0f / sqrtf((float)shape.columns), factor = LOG2_E / sqrtf((float)shape.columns);
    const long long single = shape.single() + (long long)first * shape.width();
    triples += shape.triple();
    load<ROWS, DEPTH>(queries, triples + (long long)first * stride, stride, left, shape);
    load<ROWS, DEPTH>(above, output_slopes + single, shape.width(), left, shape);
    __syncthreads();

    float own_logs[ROWS / GROUPS], own_means[ROWS / GROUPS], scales[ROWS / GROUPS];
    float sums[ROWS / GROUPS][DEPTH / LANES];
    const bool whole = aligned(outputs + single, shape.columns);
#pragma unroll
    for (int i = 0; i < ROWS / GROUPS; i++) {
        const int row = group + i * GROUPS;
        const long long log = shape.log() + first + row;
        float mean = 0.0f;
#pragma unroll
        for (int part = 0; part < DEPTH / LANES; part += 4) {
            const int column = part * LANES + lane * 4;
            Four made = {};
            if (row < left)
                made = four(outputs + single + (long long)row * shape.width(), column, shape.columns, whole);
#pragma unroll
            for (int d = 0; d < 4; d++) {
                mean += made.at[d] * above[row][column + d];
                sums[i][part + d] = 0.0f;
            }
        }
        own_means[i] = sum_of_lanes(mean);
        own_logs[i] = row < left ? logs[log] : 0.0f;
        scales[i] = scale;
        if (lane == 0 && row < left)
            means[log] = own_means[i];
    }
    for (int key = 0; key < seen; key += COLUMNS) {
        __syncthreads();
        load_keys_and_values<COLUMNS, DEPTH>(keys, values, triples, key, shape);
        __syncthreads();
        float scores[ROWS / GROUPS][COLUMNS / LANES], inner[ROWS / GROUPS][COLUMNS / LANES];
        multiply<ROWS, COLUMNS, DEPTH>(scores, queries, keys);
        multiply<ROWS, COLUMNS, DEPTH>(inner, above, values);
#pragma unroll
        for (int i = 0; i < ROWS / GROUPS; i++) {
            const int row = group + i * GROUPS;
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; j++) {
                const bool sees = key + lane + j * LANES <= first + row;
                const float weight = sees ? exp2f(scores[i][j] * factor - own_logs[i]) : 0.0f;
                weights[row][lane + j * LANES] = weight * (inner[i][j] - own_means[i]);
            }
        }
        __syncwarp();
        add_weighted<ROWS, COLUMNS, DEPTH>(sums, weights, keys);
    }
    store<ROWS, DEPTH>(slopes + shape.triple() + (long long)first * stride, stride, left, shape, sums, scales);
}

// The derivatives by ROWS keys and by their values, COLUMNS queries at a time. `means` are those of `attend_queries`.
template <int DEPTH, int ROWS, int COLUMNS>
static __device__ void attend_keys(float *__restrict__ slopes, const float *__restrict__ triples,
                                   const float *__restrict__ output_slopes, const float *__restrict__ logs,
                                   const float *__restrict__ means, Shape shape)
{
    __shared__ __align__(16) float keys[ROWS][DEPTH + 4];
    __shared__ __align__(16) float values[ROWS][DEPTH + 4];
    __shared__ __align__(16) float queries[COLUMNS][DEPTH + 4];
    __shared__ __align__(16) float above[COLUMNS][DEPTH + 4];
    __shared__ __align__(16) float weights[ROWS][COLUMNS + 4];
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // The first rows are attended to by most queries.
    const int first = blockIdx.y * ROWS, left = shape.time - first, stride = 3 * shape.width();
    const float scale = 1.0f / sqrtf((float)shape.columns), factor = LOG2_E / sqrtf((float)shape.columns);
    triples += shape.triple();
    slopes += shape.triple() + (long long)first * stride + shape.width();
    output_slopes += shape.single();
    logs += shape.log();
    means += shape.log();
    load_keys_and_values<ROWS, DEPTH>(keys, values, triples, first, shape);

    float key_sums[ROWS / GROUPS][DEPTH / LANES], value_sums[ROWS / GROUPS][DEPTH / LANES];
    float scales[ROWS / GROUPS], ones[ROWS / GROUPS];
#pragma unroll
    for (int i = 0; i < ROWS / GROUPS; i++) {
        scales[i] = scale;
        ones[i] = 1.0f;
#pragma unroll
        for (int d = 0; d < DEPTH / LANES; d++)
            key_sums[i][d] = value_sums[i][d] = 0.0f;
    }
    for (int query = first; query < shape.time; query += COLUMNS) {
        __syncthreads();
        load<COLUMNS, DEPTH>(queries, triples + (long long)query * stride, stride, shape.time - query, shape);
        load<COLUMNS, DEPTH>(above, output_slopes + (long long)query * shape.width(), shape.width(),
                             shape.time - query, shape);
        __syncthreads();
        float scores[ROWS / GROUPS][COLUMNS / LANES], inner[ROWS / GROUPS][COLUMNS / LANES];
        multiply<ROWS, COLUMNS, DEPTH>(scores, keys, queries);
        multiply<ROWS, COLUMNS, DEPTH>(inner, values, above);
#pragma unroll
        for (int j = 0; j < COLUMNS / LANES; j++) {
            const int seer = query + lane + j * LANES;
            const float log = seer < shape.time ? logs[seer] : 0.0f, mean = seer < shape.time ? means[seer] : 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS / GROUPS; i++) {
                const int row = group + i * GROUPS;
                const bool sees = seer < shape.time && first + row <= seer;
                const float weight = sees ? exp2f(scores[i][j] * factor - log) : 0.0f;
                weights[row][lane + j * LANES] = weight;
                inner[i][j] = weight * (inner[i][j] - mean);
            }
        }
        __syncwarp();
        add_weighted<ROWS, COLUMNS, DEPTH>(value_sums, weights, above);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROWS / GROUPS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; j++)
                weights[group + i * GROUPS][lane + j * LANES] = inner[i][j];
        __syncwarp();
        add_weighted<ROWS, COLUMNS, DEPTH>(key_sums, weights, queries);
    }
    store<ROWS, DEPTH>(slopes, stride, left, shape, key_sums, scales);
    store<ROWS, DEPTH>(slopes + shape.width(), stride, left, shape, value_sums, ones);
}

// Kernels for heads of up to DEPTH columns; the columns beyond a head's own are zeros. ROWS is the same as on the host
// (`attention.rs`). The backward kernels take BACK keys or queries at a time, since more of their tiles must fit into
// shared memory, of which a block has 48 KiB by default.
#define KERNELS(DEPTH, ROWS, COLUMNS, BACK) \
    extern "C" __global__ void __launch_bounds__(THREADS) \
    attention_##DEPTH(float *outputs, float *logs, const float *triples, int time, int heads, int columns) \
    { \
        attend<DEPTH, ROWS, COLUMNS>(outputs, logs, triples, {time, heads, columns}); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) \
    attention_queries_##DEPTH(float *slopes, float *means, const float *triples, const float *outputs, \
                              const float *output_slopes, const float *logs, int time, int heads, int columns) \
    { \
        attend_queries<DEPTH, ROWS, BACK>(slopes, means, triples, outputs, output_slopes, logs, \
                                          {time, heads, columns}); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS) \
    attention_keys_##DEPTH(float *slopes, const float *triples, const float *output_slopes, const float *logs, \
                           const float *means, int time, int heads, int columns) \
    { \
        attend_keys<DEPTH, ROWS, BACK>(slopes, triples, output_slopes, logs, means, {time, heads, columns}); \
    }

KERNELS(64, 64, 32, 16)
KERNELS(128, 32, 16, 8)
