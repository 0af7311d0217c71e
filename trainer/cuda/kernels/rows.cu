// A GPT's work on rows and on single numbers: layer norm, GELU, embeddings, and sums over many rows.
//
// There are no atomics. The order of a sum within a row depends only on the row's width, and the order of a sum over
// rows only on the number of rows.

#define THREADS 128
#define WARP 32
// Rows of a block in which each warp has one row.
#define WARPS (THREADS / WARP)
// Of a block that sums over rows: its threads across, of four columns each, its threads down, and its rows.
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

// Normalises each row of `from` to mean 0 and variance 1, scales it by `weight` and adds `bias`. If it `adds`, `more` is
// first added to the row, and the sum written to `stream`, which may be `from`. `stats` keeps each row's mean and
// 1 / deviation. A warp for each row.
template <class Number>
static __device__ void norm(Number *__restrict__ out, float *__restrict__ stats, float *stream, const float *from,
                            const Number *__restrict__ more, const float *__restrict__ weight,
                            const float *__restrict__ bias, int rows, int width, int adds)
{
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, first = threadIdx.x % WARP * 4;
    if (row >= rows)
        return;
    const bool whole = aligned(out, width) && aligned(stream, width) && aligned(from, width) &&
                       (!adds || aligned(more, width));
    const bool whole_pair = aligned(weight, width) && aligned(bias, width);
    out += (long long)row * width;
    stream += (long long)row * width;
    from += (long long)row * width;
    more += (long long)row * width;

    float sum = 0.0f;
    for (int place = first; place < width; place += 4 * WARP) {
        Four x = four(from, place, width, whole);
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
    // A thread reads again only what it has written itself.
    const float *const sums = adds ? stream : from;

    float squares = 0.0f;
    for (int place = first; place < width; place += 4 * WARP) {
        const Four x = four(sums, place, width, whole);
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
        Four x = four(sums, place, width, whole);
        const Four w = four(weight, place, width, whole_pair), b = four(bias, place, width, whole_pair);
        for (int i = 0; i < 4; i++)
            x.at[i] = (x.at[i] - mean) * scale * w.at[i] + b.at[i];
        put(out, place, width, whole, x);
    }
}

// Outputs, and what is added, in f32 or in bf16.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(float *out, float *stats, float *stream, const float *from, const float *more, const float *weight,
           const float *bias, int rows, int width, int adds)
{
    norm(out, stats, stream, from, more, weight, bias, rows, width, adds);
}

extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_bf16(Bf16 *out, float *stats, float *stream, const float *from, const Bf16 *more, const float *weight,
                const float *bias, int rows, int width, int adds)
{
    norm(out, stats, stream, from, more, weight, bias, rows, width, adds);
}

// The derivative of `layer_norm` by its inputs, from `slope_out`, that by its outputs: written, or added if it `adds`. In
// bf16 a `rounded` copy of the result is written, too. A warp for each row.
template <class Number>
static __device__ void norm_slope(float *__restrict__ slope_in, Bf16 *__restrict__ rounded,
                                  const float *__restrict__ inputs, const float *__restrict__ weight,
                                  const float *__restrict__ stats, const Number *__restrict__ slope_out, int rows,
                                  int width, int adds)
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
        if constexpr (sizeof(Number) == sizeof(Bf16))
            put(rounded + (long long)row * width, place, width, whole && aligned(rounded, width), into);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_slope(float *slope_in, const float *inputs, const float *weight, const float *stats, const float *slope_out,
                 int rows, int width, int adds)
{
    norm_slope(slope_in, nullptr, inputs, weight, stats, slope_out, rows, width, adds);
}

extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_slope_bf16(float *slope_in, Bf16 *rounded, const float *inputs, const float *weight, const float *stats,
                      const Bf16 *slope_out, int rows, int width, int adds)
{
    norm_slope(slope_in, rounded, inputs, weight, stats, slope_out, rows, width, adds);
}

// The sums of four columns, each from top to bottom, of the threads that have them. The first of these threads gets them.
static __device__ Four sum_of_columns(const Four &values, Four (*shared)[ACROSS])
{
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    __syncthreads();
    shared[down][across] = values;
    __syncthreads();
    Four sums = shared[0][across];
    for (int i = 1; i < DOWN; i++)
        for (int j = 0; j < 4; j++)
            sums.at[j] += shared[i][across].at[j];
    return sums;
}

// Writes the sums of CHUNK rows each: a row of `sums` for each chunk.
template <class Number>
static __device__ void sum_by_chunks(float *__restrict__ sums, const Number *__restrict__ numbers, int rows,
                                     int columns)
{
    __shared__ Four shared[DOWN][ACROSS];
    const int column = 4 * (blockIdx.x * ACROSS + threadIdx.x % ACROSS);
    const int end = min(rows, (int)(blockIdx.y + 1) * CHUNK);
    const bool whole = aligned(numbers, columns);
    Four sum = {};
#pragma unroll 4
    for (int row = blockIdx.y * CHUNK + threadIdx.x / ACROSS; row < end; row += DOWN) {
        const Four more = four(numbers + (long long)row * columns, column, columns, whole);
        for (int i = 0; i < 4; i++)
            sum.at[i] += more.at[i];
    }
    sum = sum_of_columns(sum, shared);
    if (threadIdx.x < ACROSS)
        put(sums + (long long)blockIdx.y * columns, column, columns, aligned(sums, columns), sum);
}

extern "C" __global__ void __launch_bounds__(ACROSS *DOWN)
sum_chunks(float *sums, const float *numbers, int rows, int columns)
{
    sum_by_chunks(sums, numbers, rows, columns);
}

extern "C" __global__ void __launch_bounds__(ACROSS *DOWN)
sum_chunks_bf16(float *sums, const Bf16 *numbers, int rows, int columns)
{
    sum_by_chunks(sums, numbers, rows, columns);
}

// As `sum_chunks`, for the derivatives of `layer_norm` by its weight and by its bias, to which each row adds its share.
template <class Number>
static __device__ void sum_norms(float *__restrict__ weights, float *__restrict__ biases,
                                 const float *__restrict__ inputs, const float *__restrict__ stats,
                                 const Number *__restrict__ slope_out, int rows, int columns)
{
    __shared__ Four shared[DOWN][ACROSS];
    const int column = 4 * (blockIdx.x * ACROSS + threadIdx.x % ACROSS);
    const int end = min(rows, (int)(blockIdx.y + 1) * CHUNK);
    const bool whole = aligned(inputs, columns) && aligned(slope_out, columns);
    Four weight = {}, bias = {};
#pragma unroll 4
    for (int row = blockIdx.y * CHUNK + threadIdx.x / ACROSS; row < end; row += DOWN) {
        const float mean = stats[2 * (long long)row], scale = stats[2 * (long long)row + 1];
        const Four slope = four(slope_out + (long long)row * columns, column, columns, whole);
        const Four x = four(inputs + (long long)row * columns, column, columns, whole);
        for (int i = 0; i < 4; i++) {
            weight.at[i] += slope.at[i] * ((x.at[i] - mean) * scale);
            bias.at[i] += slope.at[i];
        }
    }
    weight = sum_of_columns(weight, shared);
    bias = sum_of_columns(bias, shared);
    if (threadIdx.x < ACROSS) {
        put(weights + (long long)blockIdx.y * columns, column, columns, aligned(weights, columns), weight);
        put(biases + (long long)blockIdx.y * columns, column, columns, aligned(biases, columns), bias);
    }
}

extern "C" __global__ void __launch_bounds__(ACROSS *DOWN)
layer_norm_chunks(float *weights, float *biases, const float *inputs, const float *stats, const float *slope_out,
                  int rows, int columns)
{
    sum_norms(weights, biases, inputs, stats, slope_out, rows, columns);
}

extern "C" __global__ void __launch_bounds__(ACROSS *DOWN)
layer_norm_chunks_bf16(float *weights, float *biases, const float *inputs, const float *stats, const Bf16 *slope_out,
                       int rows, int columns)
{
    sum_norms(weights, biases, inputs, stats, slope_out, rows, columns);
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

// What follows a product in bf16 where cuBLASLt does not do that itself; the same list as the host's `Epilogue`.
#define BIAS_BF16 1
#define GELU_BF16 2
#define GELU_SLOPE_BF16 3

// Adds a bias; adds it, keeps the sums as `inputs` and takes their GELU; or turns a derivative by GELU's outputs into
// that by its `inputs`. A block for each row of `columns` numbers.
extern "C" __global__ void __launch_bounds__(THREADS)
follow_bf16(Bf16 *out, Bf16 *inputs, const Bf16 *bias, int columns, int after)
{
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        const long long place = (long long)blockIdx.x * columns + column;
        float value = widened(out[place]);
        if (after == GELU_SLOPE_BF16) {
            const float x = widened(inputs[place]), share = gate(x);
            value *= share + x * share * (1.0f - share) * 2.0f * GELU * (1.0f + 3.0f * CUBE * x * x);
        } else {
            value += widened(bias[column]);
        }
        if (after == GELU_BF16) {
            write(inputs + place, value);
            value *= gate(value);
        }
        write(out + place, value);
    }
}

// Writes the parameters in bf16: `before` numbers, then `gap` zeros, then the others. There are `count` in all, with the
// zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
round_parameters(Bf16 *__restrict__ to, const float *__restrict__ from, long long count, long long before,
                 long long gap)
{
    const long long first = 4 * ((long long)blockIdx.x * THREADS + threadIdx.x);
    Four numbers;
    for (int i = 0; i < 4; i++) {
        const long long place = first + i;
        const bool there = place < count && (place < before || place >= before + gap);
        numbers.at[i] = there ? from[place < before ? place : place - gap] : 0.0f;
    }
    if (first < count)
        put(to, first, count, first + 4 <= count, numbers);
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
