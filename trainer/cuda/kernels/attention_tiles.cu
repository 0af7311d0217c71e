// What a warp does with tiles, by tensor cores. The host puts this file before `attention_bf16.cu`.

#define THREADS 128
#define WARP 32
#define WARPS (THREADS / WARP)
// Numbers that are copied at once, and by which a row in shared memory is longer than it must be: so eight rows, which
// are read together, lie in different banks.
#define AT_ONCE 8

// A thread's lane, and its place in each matrix, as in `tensor_cores.cu`.
static __device__ int lane() { return threadIdx.x % WARP; }
static __device__ int group() { return lane() / 4; }
static __device__ int pair() { return lane() % 4 * 2; }

// Begins to fill a tile with rows, which begin `stride` apart. Only `left` of them exist; the others become zeros.
template <int ROWS, int DEPTH>
static __device__ void begin_tile(Bf16 (*tile)[DEPTH + AT_ONCE], const Bf16 *from, int stride, int left)
{
    // Neighbouring threads have the parts of one row, and all threads as many parts.
    constexpr int PARTS = DEPTH / AT_ONCE, ROWS_AT_ONCE = THREADS / PARTS;
    static_assert(ROWS % ROWS_AT_ONCE == 0, "whole rounds of all threads");
    const int column = threadIdx.x % PARTS * AT_ONCE;
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
        const int row = threadIdx.x / PARTS + i * ROWS_AT_ONCE;
        const bool there = row < left;
        begin_copy<16>(&tile[row][column], from + (there ? row * stride : 0) + column, there);
    }
}

// Begins to fill a tile with one number for each row.
template <int ROWS> static __device__ void begin_numbers(float *tile, const float *from, int left)
{
    static_assert(ROWS <= THREADS, "a thread for each");
    const int row = threadIdx.x;
    if (row < ROWS)
        begin_copy<4>(&tile[row], from + (row < left ? row : 0), row < left);
}

// Reads the warp's rows, which begin `stride` apart, as left operands: those from `first` on, of which only `left` exist.
template <int EACH, int DEPTH>
static __device__ void read_rows(unsigned (&out)[EACH][DEPTH / 16][4], const Bf16 *from, int stride, int first,
                                 int left)
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int row = 16 * i + group() + part % 2 * 8;
            const Bf16 *const numbers = from + (long long)(first + row) * stride + pair() + part / 2 * 8;
#pragma unroll
            for (int d = 0; d < DEPTH / 16; d++)
                out[i][d][part] = row < left ? *(const unsigned *)(numbers + 16 * d) : 0;
        }
}

// Reads a number for each of the thread's rows, zero for rows that do not exist.
template <int EACH>
static __device__ void read_numbers(float (&out)[EACH][2], const float *from, int first, int left)
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * i + group() + 8 * half;
            out[i][half] = row < left ? from[first + row] : 0.0f;
        }
}

template <int EACH, int PARTS> static __device__ void clear(float (&sums)[EACH][PARTS][4])
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sums[i][part][c] = 0.0f;
}

// Writes the dot products of the warp's rows of `left` with the rows of `right`.
template <int EACH, int COLUMNS, int DEPTH>
static __device__ void dot_products(float (&out)[EACH][COLUMNS / 8][4], const unsigned (&left)[EACH][DEPTH / 16][4],
                                    const Bf16 (*right)[DEPTH + AT_ONCE])
{
    clear(out);
    // Rows of `right` are columns of the right operand, so its matrices are read as they lie: two of 8 rows for one step
    // of 16 numbers, and two of the next 8 rows.
    const int row = lane() / 16 * 8 + lane() % 8, column = lane() / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < DEPTH / 16; d++)
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
            unsigned rights[4];
            load_matrices(rights, &right[16 * j + row][16 * d + column]);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                multiply_add(out[i][2 * j], left[i][d], rights[0], rights[1]);
                multiply_add(out[i][2 * j + 1], left[i][d], rights[2], rights[3]);
            }
        }
}

// Makes the scores UNSEEN of which the query does not see the key. Rows and columns of the scores are those from
// `first_row` and `first_column` on; KEYS says that the rows are keys, else they are queries.
template <bool KEYS, int EACH, int PARTS>
static __device__ void hide_unseen(float (&scores)[EACH][PARTS][4], int first_row, int first_column)
{
    const int last_row = first_row + 16 * EACH - 1, last_column = first_column + 8 * PARTS - 1;
    if (KEYS ? last_row <= first_column : last_column <= first_row)
        return;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < PARTS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int row = first_row + 16 * i + group() + c / 2 * 8, column = first_column + 8 * j + pair() + c % 2;
                if (KEYS ? row > column : column > row)
                    scores[i][j][c] = UNSEEN;
            }
}

// Adds to the warp's rows the rows of `right`, each times its weight, which is rounded to bf16.
template <int EACH, int COLUMNS, int DEPTH>
static __device__ void add_weighted_rows(float (&sums)[EACH][DEPTH / 8][4],
                                         const float (&weights)[EACH][COLUMNS / 8][4],
                                         const Bf16 (*right)[DEPTH + AT_ONCE])
{
    const int row = lane() % 16, column = lane() / 16 * 8;
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
        // Two neighbouring parts of sums lie as one left operand does.
        unsigned left[EACH][4];
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const float *const two = &weights[i][2 * j + part / 2][part % 2 * 2];
                left[i][part] = rounded_pair(two[0], two[1]);
            }
#pragma unroll
        for (int d = 0; d < DEPTH / 16; d++) {
            unsigned rights[4];
            load_transposed(rights, &right[16 * j + row][16 * d + column]);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                multiply_add(sums[i][2 * d], left[i], rights[0], rights[1]);
                multiply_add(sums[i][2 * d + 1], left[i], rights[2], rights[3]);
            }
        }
    }
}

// Writes the warp's rows in bf16, each times its factor. Only `left` of them exist.
template <int EACH, int DEPTH>
static __device__ void write_rows(Bf16 *to, int stride, int left, int columns,
                                  const float (&sums)[EACH][DEPTH / 8][4], const float (&factors)[EACH][2])
{
    const bool in_pairs = columns % 2 == 0 && stride % 2 == 0 && (unsigned long long)to % 4 == 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * i + group() + 8 * half;
            if (row >= left)
                continue;
            Bf16 *const line = to + (long long)row * stride;
#pragma unroll
            for (int d = 0; d < DEPTH / 8; d++) {
                const int column = 8 * d + pair();
                const float factor = factors[i][half];
                const unsigned two = rounded_pair(sums[i][d][2 * half] * factor, sums[i][d][2 * half + 1] * factor);
                if (in_pairs && column < columns) {
                    *(unsigned *)(line + column) = two;
                    continue;
                }
                if (column < columns)
                    line[column] = (Bf16)two;
                if (column + 1 < columns)
                    line[column + 1] = (Bf16)(two >> 16);
            }
        }
}

// The largest value, and the sum of the values, of the four threads that share a row.
static __device__ float largest_of_row(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

static __device__ float sum_of_row(float value)
{
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}
