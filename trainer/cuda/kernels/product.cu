// Products of matrices, with what follows a layer's product (bias, ReLU, mask). The operands are f32, or f32 rounded to
// bf16; sums are f32. For products by cuBLASLt: the rounding before them, and what follows them. Tensor cores are not
// used.
//
// Each number of the product is summed by one thread, in the order of the inner dimension. So equal shapes and contents
// give equal bits, and a row's bits do not depend on the number of rows.

#define TILE 64
#define DEPTH 16
#define EACH 4
#define ACROSS (TILE / EACH)
#define THREADS (ACROSS * ACROSS)

// What follows a product; the same list as the host's `After`.
#define PLAIN 0
#define BIAS 1
#define BIAS_RELU 2
#define WHERE_POSITIVE 3

union Bits {
    float value;
    unsigned bits;
};

// The nearest bf16, as the upper half of an f32's bits. Of two that are equally near it is the one whose last bit is 0,
// as IEEE 754 rounds. What is too large becomes infinite; NaN stays NaN. It uses integers alone, so that every compiler
// gives the same result.
static __device__ unsigned short nearest_bf16(float value)
{
    Bits of;
    of.value = value;
    if ((of.bits & 0x7fffffffu) > 0x7f800000u)
        return (unsigned short)(of.bits >> 16 | 0x40u);
    return (unsigned short)((of.bits + 0x7fffu + (of.bits >> 16 & 1u)) >> 16);
}

// The number as a product's operand: rounded to bf16, if it `rounds`.
static __device__ float operand(float value, int rounds)
{
    if (!rounds)
        return value;
    Bits of;
    of.bits = (unsigned)nearest_bf16(value) << 16;
    return of.value;
}

// The product's number at this place and column, after the bias, ReLU or mask.
static __device__ float followed(float value, const float *more, long long place, int column, int after)
{
    if (after == BIAS || after == BIAS_RELU)
        value += more[column];
    if (after == BIAS_RELU)
        value = value > 0.0f ? value : 0.0f;
    if (after == WHERE_POSITIVE && !(more[place] > 0.0f))
        value = 0.0f;
    return value;
}

// Writes left · right into `out`: `rows` by `columns`, row by row, summed over `inner`. Each operand has a stride
// between rows and one between columns. `more` is a bias for each column, or a mask of the product's shape: where it is
// not above zero, the product becomes zero. With `rounds`, operands are rounded to bf16. A block computes TILE rows and
// columns, a thread EACH by EACH of them.
extern "C" __global__ void __launch_bounds__(THREADS)
product(float *out, const float *left, long long left_row, long long left_column, const float *right,
        long long right_row, long long right_column, const float *more, int rows, int columns, int inner, int after,
        int rounds)
{
    __shared__ float left_tile[DEPTH][TILE + 1];
    __shared__ float right_tile[DEPTH][TILE + 1];
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    const int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS;
    float sums[EACH][EACH];
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++)
            sums[i][j] = 0.0f;

    for (int depth = 0; depth < inner; depth += DEPTH) {
        for (int place = threadIdx.x; place < DEPTH * TILE; place += THREADS) {
            // Neighbouring threads read neighbouring numbers, whether the matrix is transposed or not.
            const int d = left_column == 1 ? place % DEPTH : place / TILE;
            const int r = left_column == 1 ? place / DEPTH : place % TILE;
            const bool in = first_row + r < rows && depth + d < inner;
            left_tile[d][r] =
                in ? operand(left[(first_row + r) * left_row + (depth + d) * left_column], rounds) : 0.0f;
        }
        for (int place = threadIdx.x; place < DEPTH * TILE; place += THREADS) {
            const int d = right_row == 1 ? place % DEPTH : place / TILE;
            const int c = right_row == 1 ? place / DEPTH : place % TILE;
            const bool in = first_column + c < columns && depth + d < inner;
            right_tile[d][c] =
                in ? operand(right[(depth + d) * right_row + (first_column + c) * right_column], rounds) : 0.0f;
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; d++) {
            float lefts[EACH], rights[EACH];
            for (int i = 0; i < EACH; i++) {
                lefts[i] = left_tile[d][row + i * ACROSS];
                rights[i] = right_tile[d][column + i * ACROSS];
            }
            for (int i = 0; i < EACH; i++)
                for (int j = 0; j < EACH; j++)
                    sums[i][j] += lefts[i] * rights[j];
        }
        __syncthreads();
    }

    for (int i = 0; i < EACH; i++) {
        for (int j = 0; j < EACH; j++) {
            const int r = first_row + row + i * ACROSS, c = first_column + column + j * ACROSS;
            if (r >= rows || c >= columns)
                continue;
            const long long place = (long long)r * columns + c;
            out[place] = followed(sums[i][j], more, place, c, after);
        }
    }
}

// Applies what follows a product to its numbers, `columns` in a row, as `product` does. A block for each row.
extern "C" __global__ void follow(float *out, const float *more, int columns, int after)
{
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        const long long place = (long long)blockIdx.x * columns + column;
        out[place] = followed(out[place], more, place, column, after);
    }
}

// Writes the nearest bf16 of each number, `columns` in a row. Rows begin `from_stride` and `to_stride` apart. A block
// for each row.
extern "C" __global__ void round_to_bf16(unsigned short *to, const float *from, int columns, long long from_stride,
                                         long long to_stride)
{
    for (int column = threadIdx.x; column < columns; column += THREADS)
        to[blockIdx.x * to_stride + column] = nearest_bf16(from[blockIdx.x * from_stride + column]);
}
