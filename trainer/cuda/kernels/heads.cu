// How sequences and heads lie in a batch, for attention. The host puts this file before `attention.cu` and
// `attention_bf16.cu`.

// The score of a masked position: its power of 2 is zero, and differences of scores stay finite.
#define UNSEEN -1e30f
#define LOG2_E 1.44269504f

// How sequences and heads lie in the rows of a batch.
struct Shape {
    int time, heads, columns;

    __device__ int width() const { return heads * columns; }
    // Where the block's head begins: in rows of three widths (`triple`), in rows of one width (`single`), and in the
    // logarithms (`log`).
    __device__ long long triple() const
    {
        return (long long)(blockIdx.x / heads) * time * 3 * width() + blockIdx.x % heads * columns;
    }
    __device__ long long single() const
    {
        return (long long)(blockIdx.x / heads) * time * width() + blockIdx.x % heads * columns;
    }
    __device__ long long log() const { return (long long)blockIdx.x * time; }
};
