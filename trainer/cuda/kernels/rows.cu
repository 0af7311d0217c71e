// A GPT's work on rows and on single numbers: layer norm, GELU, embeddings, and sums over many rows.
//
// There are no atomics. The order of a sum within a row depends only on the row's width, and the order of a sum over
// rows only on the number of rows.

#define THREADS 128
#define WARP 32
// Rows of a block in which each warp has one row.
#define WARPS (THREADS / WARP)
// Of a block that sums over rows: its columns, its threads for each column, and its rows.
#define ACROSS 32
#define DOWN 8
#define CHUNK 256

// Keeps a variance from being zero.
#define EPSILON 1e-5f

// sqrt(2 / π), and the cube's weight.
#define GELU 0.7978846f
#define CUBE 0.044715f

// The sum over a warp, which all its threads get.
static __device__ float sum_of_warp(float value)
{
    for (int flips = WARP / 2; flips > 0; flips /= 2)
        value += __shfl_xor_sync(0xffffffff, value, flips);
    return value;
}

// Normalises each row of `stream` to mean 0 and variance 1, scales it by `weight` and adds `bias`. If it `adds`, `more`
// is first added to the stream. `stats` keeps each row's mean and 1 / deviation. A warp for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(float *__restrict__ out, float *__restrict__ stats, float *__restrict__ stream,
           const float *__restrict__ more, const float *__restrict__ weight, const float *__restrict__ bias, int rows,
           int width, int adds)
{
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, first = threadIdx.x % WARP * 4;
    if (row >= rows)
        return;
    const bool whole = aligned(out, width) && aligned(stream, width) && (!adds || aligned(more, width));
    const bool whole_pair = aligned(weight, width) && aligned(bias, width);
    out += (long long)row * width;
    stream += (long long)row * width;
    more += (long long)row * width;

    float sum = 0.0f;
    for (int place = first; place < width; place += 4 * WARP) {
        Four x = four(stream, place, width, whole);
        if (adds) {
            const Four y = four(more, place, width, whole);
            for (int i = 0; i < 4; i++)
                x.at[i] += y.at[i];
            put(stream, place, width, whole, x);
        }
        for (int i = 0; i < 4; i++)
            sum += x.at[i];
    }
    const float mean = sum_of_warp(sum) / width;

    float squares = 0.0f;
    for (int place = first; place < width; place += 4 * WARP) {
        const Four x = four(stream, place, width, whole);
        for (int i = 0; i < 4; i++) {
            const float off = place + i < width ? x.at[i] - mean : 0.0f;
            squares += off * off;
        }
    }
    const float scale = 1.0f / sqrtf(sum_of_warp(squares) / width + EPSILON);

    if (threadIdx.x % WARP == 0) {
        stats[2 * (long long)row] = mean;
        stats[2 * (long long)row + 1] = scale;
    }
    for (int place = first; place < width; place += 4 * WARP) {
        Four x = four(stream, place, width, whole);
        const Four w = four(weight, place, width, whole_pair), b = four(bias, place, width, whole_pair);
        for (int i = 0; i < 4; i++)
            x.at[i] = (x.at[i] - mean) * scale * w.at[i] + b.at[i];
        put(out, place, width, whole, x);
    }
}

// The derivative of `layer_norm` by its inputs, from `slope_out`, that by its outputs: written, or added if it `adds`.
// A warp for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_slope(float *__restrict__ slope_in, const float *__restrict__ inputs, const float *__restrict__ weight,
                 const float *__restrict__ stats, const float *__restrict__ slope_out, int rows, int width, int adds)
{
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, first = threadIdx.x % WARP * 4;
    if (row >= rows)
        return;
    const bool whole = aligned(slope_in, width) && aligned(inputs, width) && aligned(slope_out, width);
    const bool whole_weight = aligned(weight, width);
    slope_in += (long long)row * width;
    inputs += (long long)row * width;
    slope_out += (long long)row * width;
    const float mean = stats[2 * (long long)row], scale = stats[2 * (long long)row + 1];

    float level = 0.0f, along = 0.0f;
    for (int place = first; place < width; place += 4 * WARP) {
        const Four x = four(inputs, place, width, whole), slope = four(slope_out, place, width, whole);
        const Four w = four(weight, place, width, whole_weight);
        for (int i = 0; i < 4; i++) {
            // Beyond the row's end all numbers are zero.
            const float scaled = slope.at[i] * w.at[i];
            level += scaled;
            along += scaled * ((x.at[i] - mean) * scale);
        }
    }
    level = sum_of_warp(level) / width;
    along = sum_of_warp(along) / width;

    for (int place = first; place < width; place += 4 * WARP) {
        const Four x = four(inputs, place, width, whole), slope = four(slope_out, place, width, whole);
        const Four w = four(weight, place, width, whole_weight);
        Four into = {};
        if (adds)
            into = four(slope_in, place, width, whole);
        for (int i = 0; i < 4; i++)
            into.at[i] += (slope.at[i] * w.at[i] - level - (x.at[i] - mean) * scale * along) * scale;
        put(slope_in, place, width, whole, into);
    }
}

// The sum of the values of a column's threads, from top to bottom. The first of these threads gets it.
static __device__ float sum_of_column(float value, float (*shared)[ACROSS + 1])
{
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    __syncthreads();
    shared[down][across] = value;
    __syncthreads();
    float sum = shared[0][across];
    for (int i = 1; i < DOWN; i++)
        sum += shared[i][across];
    return sum;
}

// Writes the sums of CHUNK rows each: a row of `sums` for each chunk.
extern "C" __global__ void __launch_bounds__(ACROSS *DOWN)
sum_chunks(float *__restrict__ sums, const float *__restrict__ numbers, int rows, int columns)
{
    __shared__ float shared[DOWN][ACROSS + 1];
    const int column = blockIdx.x * ACROSS + threadIdx.x % ACROSS, end = min(rows, (int)(blockIdx.y + 1) * CHUNK);
    float sum = 0.0f;
    if (column < columns)
        for (int row = blockIdx.y * CHUNK + threadIdx.x / ACROSS; row < end; row += DOWN)
            sum += numbers[(long long)row * columns + column];
    sum = sum_of_column(sum, shared);
    if (column < columns && threadIdx.x < ACROSS)
        sums[(long long)blockIdx.y * columns + column] = sum;
}

// As `sum_chunks`, for the derivatives of `layer_norm` by its weight and by its bias, to which each row adds its share.
extern "C" __global__ void __launch_bounds__(ACROSS *DOWN)
layer_norm_chunks(float *__restrict__ weights, float *__restrict__ biases, const float *__restrict__ inputs,
                  const float *__restrict__ stats, const float *__restrict__ slope_out, int rows, int columns)
{
    __shared__ float shared[DOWN][ACROSS + 1];
    const int column = blockIdx.x * ACROSS + threadIdx.x % ACROSS, end = min(rows, (int)(blockIdx.y + 1) * CHUNK);
    float weight = 0.0f, bias = 0.0f;
    if (column < columns)
        for (int row = blockIdx.y * CHUNK + threadIdx.x / ACROSS; row < end; row += DOWN) {
            const float mean = stats[2 * (long long)row], scale = stats[2 * (long long)row + 1];
            const float slope = slope_out[(long long)row * columns + column];
            weight += slope * ((inputs[(long long)row * columns + column] - mean) * scale);
            bias += slope;
        }
    weight = sum_of_column(weight, shared);
    bias = sum_of_column(bias, shared);
    if (column < columns && threadIdx.x < ACROSS) {
        weights[(long long)blockIdx.y * columns + column] = weight;
        biases[(long long)blockIdx.y * columns + column] = bias;
    }
}

// The factor by which GELU multiplies its input, by the tanh approximation, as in GPT-2.
static __device__ float gate(float x)
{
    return 1.0f / (1.0f + expf(-2.0f * GELU * (x + CUBE * x * x * x)));
}

// Writes GELU of each number.
extern "C" __global__ void __launch_bounds__(THREADS)
gelu(float *__restrict__ out, const float *__restrict__ inputs, long long count)
{
    const long long place = 4 * ((long long)blockIdx.x * THREADS + threadIdx.x);
    if (place >= count)
        return;
    const bool whole = place + 4 <= count && aligned(out, 4) && aligned(inputs, 4);
    Four x = four(inputs, place, count, whole);
    for (int i = 0; i < 4; i++)
        x.at[i] *= gate(x.at[i]);
    put(out, place, count, whole, x);
}

// Turns `slope`, the derivative by GELU's outputs, into that by its `inputs`.
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_slope(float *__restrict__ slope, const float *__restrict__ inputs, long long count)
{
    const long long place = 4 * ((long long)blockIdx.x * THREADS + threadIdx.x);
    if (place >= count)
        return;
    const bool whole = place + 4 <= count && aligned(slope, 4) && aligned(inputs, 4);
    Four into = four(slope, place, count, whole);
    const Four inputs_here = four(inputs, place, count, whole);
    for (int i = 0; i < 4; i++) {
        const float x = inputs_here.at[i], share = gate(x);
        into.at[i] *= share + x * share * (1.0f - share) * 2.0f * GELU * (1.0f + 3.0f * CUBE * x * x);
    }
    put(slope, place, count, whole, into);
}

// Writes, for each token of `numbers`, the sum of the token's row and its position's row. A block for each token.
extern "C" __global__ void __launch_bounds__(THREADS)
embed(float *__restrict__ out, const float *__restrict__ tokens, const float *__restrict__ positions,
      const unsigned *__restrict__ numbers, int time, int width)
{
    const bool whole = aligned(out, width) && aligned(tokens, width) && aligned(positions, width);
    out += (long long)blockIdx.x * width;
    tokens += (long long)numbers[blockIdx.x] * width;
    positions += (long long)(blockIdx.x % time) * width;
    for (int place = threadIdx.x * 4; place < width; place += 4 * THREADS) {
        Four sum = four(tokens, place, width, whole);
        const Four position = four(positions, place, width, whole);
        for (int i = 0; i < 4; i++)
            sum.at[i] += position.at[i];
        put(out, place, width, whole, sum);
    }
}

// Adds to each token's row of `gradient` those rows of `slopes` at which the token stands. `order` has the row numbers
// sorted by token. At the place where a token's rows begin in `order`, `ends` has the place after the last of them;
// elsewhere it has 0. There is a block for each place. Only the blocks at such a beginning do work, so that one block
// alone adds to a token's row, in order.
extern "C" __global__ void __launch_bounds__(THREADS)
embed_slope(float *__restrict__ gradient, const float *__restrict__ slopes, const unsigned *__restrict__ numbers,
            const unsigned *__restrict__ order, const unsigned *__restrict__ ends, int width)
{
    const unsigned end = ends[blockIdx.x];
    if (end == 0)
        return;
    const bool whole = aligned(gradient, width) && aligned(slopes, width);
    gradient += (long long)numbers[order[blockIdx.x]] * width;
    for (int place = threadIdx.x * 4; place < width; place += 4 * THREADS) {
        Four sum = four(gradient, place, width, whole);
        for (unsigned next = blockIdx.x; next < end; next++) {
            const Four more = four(slopes + (long long)order[next] * width, place, width, whole);
            for (int i = 0; i < 4; i++)
                sum.at[i] += more.at[i];
        }
        put(gradient, place, width, whole, sum);
    }
}
