// Compiles CUDA C++ kernels as C++ and runs them on the CPU, one block after the other: a test double. It shows what a
// kernel computes, that its threads meet at the same barriers, and, run in two orders, that no result depends on which
// thread comes first. It shows nothing of the speed, the warps or the behaviour of a real GPU.
//
// A block's threads are fibers, which switch only at barriers. A warp runs to its next barrier of the whole block
// before another warp runs, so that the warp's own barriers order only its own threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __syncthreads() on_cpu::barrier(__LINE__, false)
#define __syncwarp() on_cpu::barrier(__LINE__, true)
#define __shfl_xor_sync(lanes, value, flips) on_cpu::exchange<lanes>(value, flips, __LINE__)

using std::min;

struct Index {
    unsigned x, y, z;
};

// These are not static: the compiler must know that a switch of fibers may change them.
Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr size_t STACK = 128 * 1024;
constexpr unsigned WARP = 32;

struct Fiber {
    jmp_buf place;
    ucontext_t first;
    std::vector<char> stack;
    bool started = false, waits = false, for_warp = false;
    unsigned thread = 0;
    int line = 0;
};

jmp_buf scheduler;
Fiber *running;
std::function<void()> kernel;

__attribute__((noinline)) void leave()
{
    if (!_setjmp(running->place))
        _longjmp(scheduler, 1);
}

// A fiber runs one thread after the other.
inline void work()
{
    for (;;) {
        kernel();
        running->waits = false;
        leave();
    }
}

__attribute__((noinline)) void barrier(int line, bool for_warp)
{
    running->waits = true;
    running->for_warp = for_warp;
    running->line = line;
    leave();
}

// The value of the lane whose number differs in these bits.
template <unsigned lanes> float exchange(float value, unsigned flips, int line)
{
    static_assert(lanes == 0xffffffff, "all lanes of a warp");
    static float values[1024];
    const unsigned self = running->thread;
    values[self] = value;
    barrier(line, true);
    const float other = values[self ^ flips];
    barrier(-line, true);
    return other;
}

__attribute__((noinline)) void resume(Fiber &fiber)
{
    threadIdx = {fiber.thread % blockDim.x, fiber.thread / blockDim.x % blockDim.y,
                 fiber.thread / blockDim.x / blockDim.y};
    running = &fiber;
    if (_setjmp(scheduler))
        return;
    if (fiber.started)
        _longjmp(fiber.place, 1);
    fiber.started = true;
    fiber.stack.resize(STACK);
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.data();
    fiber.first.uc_stack.ss_size = STACK;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, work, 0);
    setcontext(&fiber.first);
}

// Checks that all threads of a warp or block wait, and at the same barrier.
inline void check(const std::vector<Fiber *> &waiting, unsigned threads)
{
    for (Fiber *fiber : waiting)
        if (waiting.size() != threads || fiber->line != waiting[0]->line || fiber->for_warp != waiting[0]->for_warp) {
            fprintf(stderr, "on_cpu: threads wait at different barriers, or not all of them do\n");
            abort();
        }
}

// Fibers that run no thread.
inline std::vector<Fiber *> pool;

// Runs the threads of one warp until none of them waits for its warp. Returns those that wait for the block.
inline std::vector<Fiber *> go_on(std::vector<Fiber *> warp)
{
    const unsigned threads = warp.size();
    for (;;) {
        std::vector<Fiber *> still;
        for (Fiber *fiber : warp) {
            resume(*fiber);
            (fiber->waits ? still : pool).push_back(fiber);
        }
        if (still.empty() || !still[0]->for_warp)
            return still;
        check(still, threads);
        warp.swap(still);
    }
}

inline std::vector<Fiber *> start(unsigned first, unsigned count, bool backwards)
{
    std::vector<Fiber *> warp;
    for (unsigned number = 0; number < count; number++) {
        if (pool.empty())
            pool.push_back(new Fiber);
        Fiber *fiber = pool.back();
        pool.pop_back();
        fiber->thread = first + (backwards ? count - 1 - number : number);
        warp.push_back(fiber);
    }
    return go_on(std::move(warp));
}

inline void run_block(bool backwards)
{
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z, warps = (threads + WARP - 1) / WARP;
    std::vector<Fiber *> waiting;
    for (unsigned number = 0; number < warps; number++) {
        const unsigned first = (backwards ? warps - 1 - number : number) * WARP;
        for (Fiber *fiber : start(first, std::min(WARP, threads - first), backwards))
            waiting.push_back(fiber);
    }
    while (!waiting.empty()) {
        check(waiting, threads);
        std::vector<Fiber *> still;
        for (size_t first = 0, next; first < waiting.size(); first = next) {
            const unsigned warp = waiting[first]->thread / WARP;
            for (next = first; next < waiting.size() && waiting[next]->thread / WARP == warp; next++)
                ;
            for (Fiber *fiber : go_on({waiting.begin() + first, waiting.begin() + next}))
                still.push_back(fiber);
        }
        waiting.swap(still);
    }
}

// Runs a grid. Backwards, the last block and the last thread come first.
inline void run(Index grid, Index block, std::function<void()> body, bool backwards)
{
    kernel = std::move(body);
    gridDim = grid;
    blockDim = block;
    const unsigned blocks = grid.x * grid.y * grid.z;
    for (unsigned number = 0; number < blocks; number++) {
        const unsigned place = backwards ? blocks - 1 - number : number;
        blockIdx = {place % grid.x, place / grid.x % grid.y, place / grid.x / grid.y};
        run_block(backwards);
    }
}

} // namespace on_cpu
