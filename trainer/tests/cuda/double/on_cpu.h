// Compiles CUDA C++ kernels as C++ and runs them on the CPU, a block after the other: a test double. It shows what a
// kernel computes, that its threads meet at the same barriers, and, run in two orders, that no result depends on which
// thread comes first. It shows nothing of speed, of warps or of what a real GPU does.
//
// A block's threads are fibers, which change places at barriers alone.
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
#define __launch_bounds__(...)
#define __syncthreads() on_cpu::barrier(__LINE__)

struct Index {
    unsigned x, y, z;
};

// Not static: whatever switches fibers may change them, and the compiler must know.
Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr size_t STACK = 128 * 1024;

struct Fiber {
    jmp_buf place;
    ucontext_t first;
    std::vector<char> stack;
    bool started = false, waits = false;
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

// A fiber does one thread after the other.
inline void work()
{
    for (;;) {
        kernel();
        running->waits = false;
        leave();
    }
}

__attribute__((noinline)) void barrier(int line)
{
    running->waits = true;
    running->line = line;
    leave();
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

inline void run_block(bool backwards)
{
    static std::vector<Fiber *> pool;
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    std::vector<Fiber *> waiting;
    for (unsigned number = 0; number < threads; number++) {
        if (pool.empty())
            pool.push_back(new Fiber);
        Fiber *fiber = pool.back();
        fiber->thread = backwards ? threads - 1 - number : number;
        resume(*fiber);
        if (fiber->waits) {
            pool.pop_back();
            waiting.push_back(fiber);
        }
    }
    while (!waiting.empty()) {
        const int line = waiting[0]->line;
        for (Fiber *fiber : waiting)
            if (waiting.size() != threads || fiber->line != line) {
                fprintf(stderr, "on_cpu: threads of a block wait at different barriers, or not all of them do\n");
                abort();
            }
        std::vector<Fiber *> still;
        for (Fiber *fiber : waiting) {
            resume(*fiber);
            (fiber->waits ? still : pool).push_back(fiber);
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
