// Products of matrices, with what follows a layer's product (bias, ReLU, mask). The operands are f32, f32 rounded to
// bf16, or bf16; sums are f32. For products of f32 by cuBLASLt: the rounding before them, and what follows them.
// Tensor cores are not used.
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

// The number as a product's operand: rounded to bf16, if it `rounds`.
static __device__ float operand(float value, int rounds)
{
    return rounds ? widened(nearest_bf16(value)) : value;
}

// One that is in bf16 already.
static __device__ float operand(Bf16 value, int) { return widened(value); }

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
// not above zero, the product becomes zero. With `rounds`, operands are rounded to bf16. If it `adds`, what is in
// `out` is added. A block computes TILE rows and columns, a thread EACH by EACH of them.
template <class Out, class Operand>
static __device__ void multiply(Out *out, const Operand *left, long long left_row, long long left_column,
                                const Operand *right, long long right_row, long long right_column, const float *more,
                                int rows, int columns, int inner, int after, int rounds, int adds)
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
            const float value = followed(sums[i][j], more, place, c, after);
            write(out + place, adds ? value + widened(out[place]) : value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
product(float *out, const float *left, long long left_row, long long left_column, const float *right,
        long long right_row, long long right_column, const float *more, int rows, int columns, int inner, int after,
        int rounds)
{
    multiply(out, left, left_row, left_column, right, right_row, right_column, more, rows, columns, inner, after,
             rounds, 0);
}

// Of operands in bf16: into bf16, or into f32.
extern "C" __global__ void __launch_bounds__(THREADS)
product_bf16(Bf16 *out, const Bf16 *left, long long left_row, long long left_column, const Bf16 *right,
             long long right_row, long long right_column, int rows, int columns, int inner, int adds)
{
    multiply(out, left, left_row, left_column, right, right_row, right_column, nullptr, rows, columns, inner, PLAIN, 0,
             adds);
}

extern "C" __global__ void __launch_bounds__(THREADS)
product_bf16_to_f32(float *out, const Bf16 *left, long long left_row, long long left_column, const Bf16 *right,
                    long long right_row, long long right_column, int rows, int columns, int inner, int adds)
{
    multiply(out, left, left_row, left_column, right, right_row, right_column, nullptr, rows, columns, inner, PLAIN, 0,
             adds);
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
