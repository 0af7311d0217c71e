// Causal attention of several heads by tensor cores, forward and backward: the algorithm of `attention.cu`, with inputs,
// outputs and operands of products in bf16. Scores, weights, maxima and all sums are f32.
//
// Heads of 64 columns are read where they lie. Others `attention_by_heads` first writes head by head: for each
// head of each sequence all its queries, then its keys, then its values, in rows of DEPTH numbers that end with zeros. So
// each row can be copied 16 bytes at a time.
//
// A block has one head of one sequence and a tile of its rows, and each warp has 16 or 32 of these rows to itself. The
// warp keeps them in registers, as left operands, and all that is computed for them too: the sums of one product, in the
// layout in which tensor cores leave them, are the left operand of the next. The rows of the other side come through
// shared memory, a tile at a time, while the tile before is computed with. No other block writes the block's rows, so
// there are no atomics, and a row's bits depend only on the rows that it attends to.

// The widest heads that are read where they lie; for wider ones the registers do not suffice. As on the host.
#define IN_PLACE 64

// The rows of the block's head: where the first begins, and how far apart they are.
struct Rows {
    const Bf16 *first;
    int stride;

    __device__ const Bf16 *from(int row) const { return first + (long long)row * stride; }
};

// Queries (`part` 0), keys (1) or values (2), from `triples` as they are or `sorted` by heads.
template <int DEPTH> static __device__ Rows of_head(const Bf16 *triples, Shape shape, int sorted, int part)
{
    if (DEPTH > IN_PLACE || sorted)
        return {triples + ((long long)blockIdx.x * 3 + part) * shape.time * DEPTH, DEPTH};
    return {triples + shape.triple() + part * shape.width(), 3 * shape.width()};
}

// The derivative by the outputs, in the same way.
template <int DEPTH> static __device__ Rows above_head(const Bf16 *above, Shape shape, int sorted)
{
    if (DEPTH > IN_PLACE || sorted)
        return {above + (long long)blockIdx.x * shape.time * DEPTH, DEPTH};
    return {above + shape.single(), shape.width()};
}

// Begins to fill a tile with keys and one with values: those of rows from `first` on.
template <int ROWS, int DEPTH>
static __device__ void begin_keys_and_values(Bf16 (*keys)[DEPTH + AT_ONCE], Bf16 (*values)[DEPTH + AT_ONCE],
                                             Rows all_keys, Rows all_values, int first, Shape shape)
{
    begin_tile<ROWS, DEPTH>(keys, all_keys.from(first), all_keys.stride, shape.time - first);
    begin_tile<ROWS, DEPTH>(values, all_values.from(first), all_values.stride, shape.time - first);
}

// A warp's queries.
struct Queries {
    // The first one, and how many there are from there on.
    int first, left;
    // How many keys they see, and those of the whole block.
    int seen, block_seen;
};

// The 16 · EACH queries of this warp. The blocks whose queries see most keys begin first.
template <int EACH> static __device__ Queries own_queries(Shape shape)
{
    const int rows = 16 * EACH * WARPS, block = (gridDim.y - 1 - blockIdx.y) * rows;
    const int first = block + threadIdx.x / WARP * 16 * EACH, left = shape.time - first;
    return {first, left, left > 0 ? first + 16 * EACH : 0, min(block + rows, shape.time)};
}

// The outputs for 16 · EACH queries of each warp, COLUMNS keys at a time.
template <int DEPTH, int EACH, int COLUMNS>
static __device__ void attend_in_bf16(Bf16 *__restrict__ outputs, float *__restrict__ logs,
                                      const Bf16 *__restrict__ triples, Shape shape, int sorted)
{
    __shared__ __align__(16) Bf16 keys[2][COLUMNS][DEPTH + AT_ONCE];
    __shared__ __align__(16) Bf16 values[2][COLUMNS][DEPTH + AT_ONCE];
    const auto [first, left, seen, block_seen] = own_queries<EACH>(shape);
    const float factor = LOG2_E / sqrtf((float)shape.columns);
    const Rows all_keys = of_head<DEPTH>(triples, shape, sorted, 1), all_values = of_head<DEPTH>(triples, shape, sorted, 2);
    begin_keys_and_values<COLUMNS, DEPTH>(keys[0], values[0], all_keys, all_values, 0, shape);
    unsigned queries[EACH][DEPTH / 16][4];
    const Rows own = of_head<DEPTH>(triples, shape, sorted, 0);
    read_rows<EACH, DEPTH>(queries, own.first, own.stride, first, left);

    float tops[EACH][2], totals[EACH][2], sums[EACH][DEPTH / 8][4];
    clear(sums);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            tops[i][half] = UNSEEN;
            totals[i][half] = 0.0f;
        }
    for (int key = 0, stage = 0; key < block_seen; key += COLUMNS, stage ^= 1) {
        wait_for_copies();
        // The tile is there for all warps, and none of them still reads the one before.
        __syncthreads();
        if (key + COLUMNS < block_seen)
            begin_keys_and_values<COLUMNS, DEPTH>(keys[stage ^ 1], values[stage ^ 1], all_keys, all_values, key + COLUMNS,
                                                  shape);
        if (key >= seen)
            continue;
        float scores[EACH][COLUMNS / 8][4];
        dot_products<EACH, COLUMNS, DEPTH>(scores, queries, keys[stage]);
        hide_unseen<false>(scores, first, key);
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = tops[i][half];
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++)
                    top = fmaxf(top, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
                top = largest_of_row(top);
                const float shrink = power_of_two((tops[i][half] - top) * factor), level = top * factor;
                tops[i][half] = top;
                totals[i][half] *= shrink;
#pragma unroll
                for (int d = 0; d < DEPTH / 8; d++) {
                    sums[i][d][2 * half] *= shrink;
                    sums[i][d][2 * half + 1] *= shrink;
                }
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
                    for (int c = 2 * half; c < 2 * half + 2; c++) {
                        scores[i][j][c] = power_of_two(scores[i][j][c] * factor - level);
                        totals[i][half] += scores[i][j][c];
                    }
            }
        add_weighted_rows<EACH, COLUMNS, DEPTH>(sums, scores, values[stage]);
    }

    float shares[EACH][2];
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * i + group() + 8 * half;
            const float total = sum_of_row(totals[i][half]);
            shares[i][half] = 1.0f / total;
            if (pair() == 0 && row < left)
                logs[shape.log() + first + row] = tops[i][half] * factor + log2f(total);
        }
    outputs += shape.single() + (long long)first * shape.width();
    write_rows<EACH, DEPTH>(outputs, shape.width(), left, shape.columns, sums, shares);
}

// The derivative by 16 · EACH queries of each warp, COLUMNS keys at a time. `above` is the derivative by the outputs,
// and `means` has, for each row, its dot product with the outputs, by `attention_means`.
template <int DEPTH, int EACH, int COLUMNS>
static __device__ void attend_queries_in_bf16(Bf16 *__restrict__ slopes, const Bf16 *__restrict__ triples,
                                              const Bf16 *__restrict__ above, const float *__restrict__ logs,
                                              const float *__restrict__ means, Shape shape, int sorted)
{
    __shared__ __align__(16) Bf16 keys[2][COLUMNS][DEPTH + AT_ONCE];
    __shared__ __align__(16) Bf16 values[2][COLUMNS][DEPTH + AT_ONCE];
    const auto [first, left, seen, block_seen] = own_queries<EACH>(shape);
    const int stride = 3 * shape.width();
    const float scale = 1.0f / sqrtf((float)shape.columns), factor = LOG2_E / sqrtf((float)shape.columns);
    const Rows all_keys = of_head<DEPTH>(triples, shape, sorted, 1), all_values = of_head<DEPTH>(triples, shape, sorted, 2);
    begin_keys_and_values<COLUMNS, DEPTH>(keys[0], values[0], all_keys, all_values, 0, shape);
    unsigned queries[EACH][DEPTH / 16][4], own_above[EACH][DEPTH / 16][4];
    const Rows own = of_head<DEPTH>(triples, shape, sorted, 0), aboves = above_head<DEPTH>(above, shape, sorted);
    read_rows<EACH, DEPTH>(queries, own.first, own.stride, first, left);
    read_rows<EACH, DEPTH>(own_above, aboves.first, aboves.stride, first, left);
    float own_logs[EACH][2], own_means[EACH][2], scales[EACH][2];
    read_numbers<EACH>(own_logs, logs + shape.log(), first, left);
    read_numbers<EACH>(own_means, means + shape.log(), first, left);

    float sums[EACH][DEPTH / 8][4];
    clear(sums);
    for (int key = 0, stage = 0; key < block_seen; key += COLUMNS, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (key + COLUMNS < block_seen)
            begin_keys_and_values<COLUMNS, DEPTH>(keys[stage ^ 1], values[stage ^ 1], all_keys, all_values, key + COLUMNS,
                                                  shape);
        if (key >= seen)
            continue;
        float scores[EACH][COLUMNS / 8][4], inner[EACH][COLUMNS / 8][4];
        dot_products<EACH, COLUMNS, DEPTH>(scores, queries, keys[stage]);
        hide_unseen<false>(scores, first, key);
        dot_products<EACH, COLUMNS, DEPTH>(inner, own_above, values[stage]);
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const float weight = power_of_two(scores[i][j][c] * factor - own_logs[i][c / 2]);
                    inner[i][j][c] = weight * (inner[i][j][c] - own_means[i][c / 2]);
                }
        add_weighted_rows<EACH, COLUMNS, DEPTH>(sums, inner, keys[stage]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        scales[i][0] = scales[i][1] = scale;
    slopes += shape.triple() + (long long)first * stride;
    write_rows<EACH, DEPTH>(slopes, stride, left, shape.columns, sums, scales);
}

// The derivatives by 16 keys of each warp and by their values, COLUMNS queries at a time. Queries that do not exist are
// zeros, and so are their `above`, logarithms and means: they add zeros.
template <int DEPTH, int COLUMNS>
static __device__ void attend_keys_in_bf16(Bf16 *__restrict__ slopes, const Bf16 *__restrict__ triples,
                                           const Bf16 *__restrict__ above, const float *__restrict__ logs,
                                           const float *__restrict__ means, Shape shape, int sorted)
{
    __shared__ __align__(16) Bf16 queries[2][COLUMNS][DEPTH + AT_ONCE];
    __shared__ __align__(16) Bf16 aboves[2][COLUMNS][DEPTH + AT_ONCE];
    __shared__ float tile_logs[2][COLUMNS], tile_means[2][COLUMNS];
    const int block = blockIdx.y * 16 * WARPS, first = block + threadIdx.x / WARP * 16, left = shape.time - first;
    const int stride = 3 * shape.width();
    const float scale = 1.0f / sqrtf((float)shape.columns), factor = LOG2_E / sqrtf((float)shape.columns);
    const Rows all_queries = of_head<DEPTH>(triples, shape, sorted, 0), all_above = above_head<DEPTH>(above, shape, sorted);
    logs += shape.log();
    means += shape.log();
    const auto begin = [&](int stage, int query) {
        begin_tile<COLUMNS, DEPTH>(queries[stage], all_queries.from(query), all_queries.stride, shape.time - query);
        begin_tile<COLUMNS, DEPTH>(aboves[stage], all_above.from(query), all_above.stride, shape.time - query);
        begin_numbers<COLUMNS>(tile_logs[stage], logs + query, shape.time - query);
        begin_numbers<COLUMNS>(tile_means[stage], means + query, shape.time - query);
    };
    begin(0, block);
    unsigned keys[1][DEPTH / 16][4], values[1][DEPTH / 16][4];
    const Rows own_keys = of_head<DEPTH>(triples, shape, sorted, 1), own_values = of_head<DEPTH>(triples, shape, sorted, 2);
    read_rows<1, DEPTH>(keys, own_keys.first, own_keys.stride, first, left);
    read_rows<1, DEPTH>(values, own_values.first, own_values.stride, first, left);

    float key_sums[1][DEPTH / 8][4], value_sums[1][DEPTH / 8][4];
    clear(key_sums);
    clear(value_sums);
    for (int query = block, stage = 0; query < shape.time; query += COLUMNS, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (query + COLUMNS < shape.time)
            begin(stage ^ 1, query + COLUMNS);
        // None of these queries sees a key of the warp, or there are no such keys.
        if (query + COLUMNS <= first || left <= 0)
            continue;
        float scores[1][COLUMNS / 8][4], inner[1][COLUMNS / 8][4];
        dot_products<1, COLUMNS, DEPTH>(scores, keys, queries[stage]);
        hide_unseen<true>(scores, first, query);
        dot_products<1, COLUMNS, DEPTH>(inner, values, aboves[stage]);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int column = 8 * j + pair() + c % 2;
                const float weight = power_of_two(scores[0][j][c] * factor - tile_logs[stage][column]);
                scores[0][j][c] = weight;
                inner[0][j][c] = weight * (inner[0][j][c] - tile_means[stage][column]);
            }
        add_weighted_rows<1, COLUMNS, DEPTH>(value_sums, scores, aboves[stage]);
        add_weighted_rows<1, COLUMNS, DEPTH>(key_sums, inner, queries[stage]);
    }
    const float scales[1][2] = {{scale, scale}}, ones[1][2] = {{1.0f, 1.0f}};
    slopes += shape.triple() + (long long)first * stride + shape.width();
    write_rows<1, DEPTH>(slopes, stride, left, shape.columns, key_sums, scales);
    write_rows<1, DEPTH>(slopes + shape.width(), stride, left, shape.columns, value_sums, ones);
}

// Writes the triples head by head, in rows of `depth` numbers. A block for each row of the batch.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_by_heads(Bf16 *__restrict__ to, const Bf16 *__restrict__ triples, int time, int heads, int columns, int depth)
{
    const bool whole = aligned(triples, columns);
    const int fours = depth / 4, row = blockIdx.x % time, sequence = blockIdx.x / time;
    triples += (long long)blockIdx.x * 3 * heads * columns;
    for (int place = threadIdx.x; place < 3 * heads * fours; place += THREADS) {
        const int column = place % fours * 4, part = place / fours / heads, head = place / fours % heads;
        const Four numbers = four(triples + (part * heads + head) * columns, column, columns, whole);
        const long long line = (((long long)sequence * heads + head) * 3 + part) * time + row;
        put(to + line * depth, column, depth, true, numbers);
    }
}

// Writes for each row of each head the dot product of the derivative by the outputs with these: the mean, by the
// softmax's weights, of the derivative by the weights. And, as `attention_by_heads` does, that derivative; with a
// `depth` of 0 that is left out. A block for each row of the batch; a warp for each of its heads, or for two of up to
// 64 columns.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_means(Bf16 *__restrict__ to, float *__restrict__ means, const Bf16 *__restrict__ output_slopes,
                const Bf16 *__restrict__ outputs, int time, int heads, int columns, int depth)
{
    const bool whole = aligned(output_slopes, columns) && aligned(outputs, columns);
    const int row = blockIdx.x % time, sequence = blockIdx.x / time;
    const int lanes = columns > 64 ? WARP : WARP / 2, column = threadIdx.x % lanes * 4;
    // All threads of a warp go round as often, since they add together.
#pragma unroll 2
    for (int warps = threadIdx.x / WARP * (WARP / lanes); warps < heads; warps += THREADS / lanes) {
        const int head = warps + lane() / lanes;
        const long long from = ((long long)blockIdx.x * heads + head) * columns;
        const long long line = ((long long)sequence * heads + head) * time + row;
        const int there = head < heads ? columns : 0;
        const Four slope = four(output_slopes + from, column, there, whole);
        const Four output = four(outputs + from, column, there, whole);
        float mean = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            mean += output.at[i] * slope.at[i];
        for (int flips = lanes / 2; flips > 0; flips /= 2)
            mean += __shfl_xor_sync(0xffffffff, mean, flips);
        if (head < heads && column < depth)
            put(to + line * depth, column, depth, true, slope);
        if (head < heads && column == 0)
            means[line] = mean;
    }
}

// Kernels for heads of up to DEPTH columns. The rows of a block, 64 times what follows DEPTH, are the same as on the host
// (`attention_bf16.rs`); a block of `attention_keys_bf16` has 64. Then follow the rows of a tile of each kernel.
#define KERNELS(DEPTH, EACH, COLUMNS, QUERIES_EACH, QUERIES_COLUMNS, KEYS_COLUMNS) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) \
    attention_bf16_##DEPTH(Bf16 *outputs, float *logs, const Bf16 *triples, int time, int heads, int columns, int sorted) \
    { \
        attend_in_bf16<DEPTH, EACH, COLUMNS>(outputs, logs, triples, {time, heads, columns}, sorted); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) \
    attention_bf16_queries_##DEPTH(Bf16 *slopes, const Bf16 *triples, const Bf16 *above, const float *logs, \
                                   const float *means, int time, int heads, int columns, int sorted) \
    { \
        attend_queries_in_bf16<DEPTH, QUERIES_EACH, QUERIES_COLUMNS>(slopes, triples, above, logs, means, \
                                                                     {time, heads, columns}, sorted); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) \
    attention_bf16_keys_##DEPTH(Bf16 *slopes, const Bf16 *triples, const Bf16 *above, const float *logs, \
                                const float *means, int time, int heads, int columns, int sorted) \
    { \
        attend_keys_in_bf16<DEPTH, KEYS_COLUMNS>(slopes, triples, above, logs, means, {time, heads, columns}, sorted); \
    }

KERNELS(64, 2, 64, 2, 32, 64)
KERNELS(128, 1, 32, 1, 32, 16)
