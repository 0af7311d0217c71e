// Numbers in bf16: their rounding, and reads and writes of four at once. The host puts this file behind `fours.cu`,
// before the files whose kernels take them.

// The upper half of an f32.
typedef unsigned short Bf16;

union Bits {
    float value;
    unsigned bits;
};

// The nearest bf16. Of two that are equally near it is the one whose last bit is 0, as IEEE 754 rounds. What is too large
// becomes infinite; NaN stays NaN. Where there is no instruction for it, it uses integers alone, so that every compiler
// gives the same result.
static __device__ Bf16 nearest_bf16(float value)
{
#if __CUDA_ARCH__ >= 800
    Bf16 nearest;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(nearest) : "f"(value));
    return nearest;
#else
    Bits of;
    of.value = value;
    if ((of.bits & 0x7fffffffu) > 0x7f800000u)
        return (Bf16)(of.bits >> 16 | 0x40u);
    return (Bf16)((of.bits + 0x7fffu + (of.bits >> 16 & 1u)) >> 16);
#endif
}

// A number of either kind as f32.
template <class Number> static __device__ float widened(Number number)
{
    if constexpr (sizeof(Number) == sizeof(Bf16)) {
        Bits of;
        of.bits = (unsigned)number << 16;
        return of.value;
    } else {
        return number;
    }
}

// Writes a number, rounded if its place is for bf16.
template <class Number> static __device__ void write(Number *place, float number)
{
    if constexpr (sizeof(Number) == sizeof(Bf16))
        *place = nearest_bf16(number);
    else
        *place = number;
}

// Four of them.
struct __align__(8) Bf16Four {
    Bf16 at[4];
};

template <class Index> static __device__ Four four(const Bf16 *row, Index place, Index width, bool whole)
{
    Bf16Four found = {};
    if (whole && place < width)
        found = *(const Bf16Four *)(row + place);
    else
        for (int i = 0; i < 4; i++)
            if (place + i < width)
                found.at[i] = row[place + i];
    Four numbers;
    for (int i = 0; i < 4; i++)
        numbers.at[i] = widened(found.at[i]);
    return numbers;
}

template <class Index>
static __device__ void put(Bf16 *row, Index place, Index width, bool whole, const Four &numbers)
{
    Bf16Four rounded;
    for (int i = 0; i < 4; i++)
        rounded.at[i] = nearest_bf16(numbers.at[i]);
    if (whole && place < width) {
        *(Bf16Four *)(row + place) = rounded;
        return;
    }
    for (int i = 0; i < 4; i++)
        if (place + i < width)
            row[place + i] = rounded.at[i];
}
