// Products of matrices in f32, with what follows a layer's product. Not for tensor cores, which round to fewer bits.
//
// A number of the product is summed by one thread, in the order of the inner dimension: equal shapes and contents give
// equal bits, and a row's bits do not depend on how many rows there are.

#define TILE 64
#define DEPTH 16
#define EACH 4
#define ACROSS (TILE / EACH)
#define THREADS (ACROSS * ACROSS)

// What becomes of a product's number; the host has the same list.
#define PLAIN 0
#define BIAS 1
#define BIAS_RELU 2
#define WHERE_POSITIVE 3

// Writes left · right into `out`, `rows` by `columns` and row by row, over `inner`. A matrix's numbers lie
// (row, column) strides apart. `more` is a bias for each column, or a matrix of the product's shape, whose numbers that
// are not above zero make the product's zero. A block computes TILE rows and columns, a thread EACH by EACH of them.
extern "C" __global__ void __launch_bounds__(THREADS)
product(float *out, const float *left, long long left_row, long long left_column, const float *right,
        long long right_row, long long right_column, const float *more, int rows, int columns, int inner, int after)
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
            // Neighbouring threads read neighbouring numbers, whichever way a matrix lies.
            const int d = left_column == 1 ? place % DEPTH : place / TILE;
            const int r = left_column == 1 ? place / DEPTH : place % TILE;
            const bool in = first_row + r < rows && depth + d < inner;
            left_tile[d][r] = in ? left[(first_row + r) * left_row + (depth + d) * left_column] : 0.0f;
        }
        for (int place = threadIdx.x; place < DEPTH * TILE; place += THREADS) {
            const int d = right_row == 1 ? place % DEPTH : place / TILE;
            const int c = right_row == 1 ? place / DEPTH : place % TILE;
            const bool in = first_column + c < columns && depth + d < inner;
            right_tile[d][c] = in ? right[(depth + d) * right_row + (first_column + c) * right_column] : 0.0f;
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
            float value = sums[i][j];
            if (after == BIAS || after == BIAS_RELU)
                value += more[c];
            if (after == BIAS_RELU)
                value = value > 0.0f ? value : 0.0f;
            if (after == WHERE_POSITIVE && !(more[place] > 0.0f))
                value = 0.0f;
            out[place] = value;
        }
    }
}
