// Reads and writes of four numbers at once. The host puts this file before `rows.cu` and the files of attention.

// Four numbers, which a thread reads or writes at once.
struct __align__(16) Four {
    float at[4];
};

// Whether rows of this width, the first of which begins at `first`, can be read four numbers at a time.
template <class Number> static __device__ bool aligned(const Number *first, long long width)
{
    return width % 4 == 0 && (unsigned long long)first % (4 * sizeof(Number)) == 0;
}

// Four numbers of a row of `width` numbers, from `place` on; zeros beyond its end. `whole` says that it is aligned.
template <class Index> static __device__ Four four(const float *row, Index place, Index width, bool whole)
{
    Four found = {};
    if (whole && place < width)
        return *(const Four *)(row + place);
    for (int i = 0; i < 4; i++)
        if (place + i < width)
            found.at[i] = row[place + i];
    return found;
}

// Writes four numbers of a row; none beyond its end.
template <class Index>
static __device__ void put(float *row, Index place, Index width, bool whole, const Four &numbers)
{
    if (whole && place < width) {
        *(Four *)(row + place) = numbers;
        return;
    }
    for (int i = 0; i < 4; i++)
        if (place + i < width)
            row[place + i] = numbers.at[i];
}
