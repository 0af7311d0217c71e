// The functions of `kernels/tensor_cores.cu` on the CPU, with the layouts that the PTX ISA gives (the sections are named
// there). A warp's threads show one another what they hold, and meet.
//
// A copy that a thread begins fills its place with NaN at once, and is made only when the thread waits for it. So who
// still reads what was there before finds NaN, and so does who reads before the wait.
#pragma once

#include <cstdint>
#include <cstring>

#include "on_cpu.h"

namespace on_cpu {

inline float of_bf16(unsigned bits)
{
    Bits of;
    of.bits = bits << 16;
    return of.value;
}

// What a warp's threads show one another for one instruction. Two that follow each other have places of their own: the
// third one comes when all lanes have read the first.
template <class Shown> const Shown *show(const Shown &mine, int line)
{
    static Shown shown[2][1024];
    Shown *const now = shown[running->exchanges++ % 2];
    now[running->thread] = mine;
    barrier(line, true);
    return now + running->thread / WARP * WARP;
}

// A thread's parts of a left and of a right operand, as numbers.
struct Operands {
    float left[8], right[4];
};

struct Row {
    Bf16 numbers[8];
};

inline const Row *show_row(const Bf16 *row, int line)
{
    if ((uintptr_t)row % sizeof(Row)) {
        fprintf(stderr, "on_cpu: a row of a matrix begins at no multiple of 16 bytes\n");
        abort();
    }
    Row mine;
    memcpy(&mine, row, sizeof mine);
    return show(mine, line);
}

} // namespace on_cpu

inline float half_of(unsigned pair, int second) { return on_cpu::of_bf16(second ? pair >> 16 : pair & 0xffff); }

// Element i of a left fragment is (group, pair + i % 2), 8 rows further down for i of 2, 3, 6 and 7, and 8 columns
// further right from 4 on; of a right one (pair + i % 2, group), 8 rows further down from 2 on.
inline void multiply_add(float (&sums)[4], const unsigned (&left)[4], unsigned right, unsigned right_below)
{
    on_cpu::Operands mine;
    for (int i = 0; i < 8; i++)
        mine.left[i] = half_of(left[i / 2], i % 2);
    for (int i = 0; i < 4; i++)
        mine.right[i] = half_of(i < 2 ? right : right_below, i % 2);
    const on_cpu::Operands *warp = on_cpu::show(mine, __LINE__);
    const unsigned lane = on_cpu::running->thread % on_cpu::WARP, group = lane / 4, pair = lane % 4 * 2;
    for (unsigned c = 0; c < 4; c++) {
        const unsigned row = group + c / 2 * 8, column = pair + c % 2;
        for (unsigned k = 0; k < 16; k++) {
            const on_cpu::Operands &lefts = warp[row % 8 * 4 + k % 8 / 2], &rights = warp[column * 4 + k % 8 / 2];
            sums[c] += lefts.left[k / 8 * 4 + row / 8 * 2 + k % 2] * rights.right[k / 8 * 2 + k % 2];
        }
    }
}

inline void load_matrices(unsigned (&out)[4], const Bf16 *row)
{
    const on_cpu::Row *rows = on_cpu::show_row(row, __LINE__);
    const unsigned lane = on_cpu::running->thread % on_cpu::WARP;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const Bf16 *const numbers = &rows[matrix * 8 + lane / 4].numbers[lane % 4 * 2];
        out[matrix] = numbers[0] | (unsigned)numbers[1] << 16;
    }
}

inline void load_transposed(unsigned (&out)[4], const Bf16 *row)
{
    const on_cpu::Row *rows = on_cpu::show_row(row, __LINE__);
    const unsigned lane = on_cpu::running->thread % on_cpu::WARP;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        const on_cpu::Row *const two = &rows[matrix * 8 + lane % 4 * 2];
        out[matrix] = two[0].numbers[lane / 4] | (unsigned)two[1].numbers[lane / 4] << 16;
    }
}

template <int BYTES> void begin_copy(void *shared, const void *from, bool there)
{
    static_assert(BYTES == 4 || BYTES == 16, "what cp.async copies, but for 8");
    if ((uintptr_t)shared % BYTES || (uintptr_t)from % BYTES) {
        fprintf(stderr, "on_cpu: a copy of %d bytes begins at no multiple of them\n", BYTES);
        abort();
    }
    memset(shared, 0xff, BYTES);
    on_cpu::running->copies.push_back([=] {
        if (there)
            memcpy(shared, from, BYTES);
        else
            memset(shared, 0, BYTES);
    });
}

inline void wait_for_copies()
{
    for (const auto &copy : on_cpu::running->copies)
        copy();
    on_cpu::running->copies.clear();
}

inline unsigned rounded_pair(float first, float second)
{
    return nearest_bf16(first) | (unsigned)nearest_bf16(second) << 16;
}

inline float power_of_two(float exponent)
{
    const float power = exp2f(exponent);
    return std::fpclassify(power) == FP_SUBNORMAL ? 0.0f : power;
}
