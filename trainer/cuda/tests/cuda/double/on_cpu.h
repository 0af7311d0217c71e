// Compiles CUDA C++ kernels as C++ and runs them on the CPU, one block after the other: a test double. It shows what a
// kernel computes, that its threads meet at the same barriers, and, run in two orders, that no result depends on which
// thread comes first. It shows nothing of the speed, the warps or the behaviour of a real GPU.
//
// A block's threads are fibers, which switch only at barriers. A warp runs to its next barrier of the whole block
// before another warp runs, so that the warp's own barriers order only its own threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
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

// Where a fiber goes on. The compiler's own jump saves next to nothing, and the kernels' tests jump billions of times.
// `noipa`: no caller may reason about which registers a function that switches fibers leaves alone.
struct Place {
    void *words[5];
};

struct Fiber {
    Place place;
    ucontext_t first;
    std::unique_ptr<char[]> stack;
    bool started = false, waits = false, for_warp = false;
    unsigned thread = 0, exchanges = 0;
    int line = 0;
    // What the thread has begun to copy to shared memory.
    std::vector<std::function<void()>> copies;
};

// Those of a warp that are still at work.
struct Warp {
    Fiber *fibers[WARP];
    unsigned count = 0;

    void add(Fiber *fiber) { fibers[count++] = fiber; }
};

Place scheduler;
Fiber *running;
std::function<void()> kernel;

// A function of its own: GCC wants no jump in the function that marks a place.
[[noreturn]] __attribute__((noipa)) void go_to(Place &place)
{
    __builtin_longjmp(place.words, 1);
}

__attribute__((noipa)) void leave()
{
    if (!__builtin_setjmp(running->place.words))
        go_to(scheduler);
}

// A fiber runs one thread after the other.
inline void work()
{
    for (;;) {
        kernel();
        if (!running->copies.empty()) {
            fprintf(stderr, "on_cpu: a thread ends before copies that it has begun\n");
            abort();
        }
        running->waits = false;
        leave();
    }
}

__attribute__((noipa)) void barrier(int line, bool for_warp)
{
    running->waits = true;
    running->for_warp = for_warp;
    running->line = line;
    leave();
}

// The value of the lane whose number differs in these bits. Two exchanges that follow each other have places of their
// own: the third one comes when all lanes have read the first.
template <unsigned lanes> float exchange(float value, unsigned flips, int line)
{
    static_assert(lanes == 0xffffffff, "all lanes of a warp");
    static float values[2][1024];
    const unsigned self = running->thread;
    float *const now = values[running->exchanges++ % 2];
    now[self] = value;
    barrier(line, true);
    return now[self ^ flips];
}

__attribute__((noipa)) void resume(Fiber &fiber)
{
    threadIdx = {fiber.thread % blockDim.x, fiber.thread / blockDim.x % blockDim.y,
                 fiber.thread / blockDim.x / blockDim.y};
    running = &fiber;
    if (__builtin_setjmp(scheduler.words))
        return;
    if (running->started)
        go_to(running->place);
    fiber.started = true;
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = STACK;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, work, 0);
    setcontext(&fiber.first);
}

// Checks that all threads of a warp or block wait, and at the same barrier.
inline void check(bool all, const Fiber *one, const Fiber *other)
{
    if (!all || one->line != other->line || one->for_warp != other->for_warp) {
        fprintf(stderr, "on_cpu: threads wait at different barriers, or not all of them do\n");
        abort();
    }
}

// Fibers that run no thread.
inline std::vector<Fiber *> pool;

// Runs the threads of one warp until none of them waits for its warp. Those that wait for the block are left in it.
inline void go_on(Warp &warp)
{
    const unsigned threads = warp.count;
    for (;;) {
        Warp still;
        for (unsigned number = 0; number < warp.count; number++) {
            resume(*warp.fibers[number]);
            if (warp.fibers[number]->waits)
                still.add(warp.fibers[number]);
            else
                pool.push_back(warp.fibers[number]);
        }
        warp.count = still.count;
        std::copy_n(still.fibers, still.count, warp.fibers);
        if (!warp.count || !warp.fibers[0]->for_warp)
            return;
        for (unsigned number = 0; number < warp.count; number++)
            check(warp.count == threads, warp.fibers[number], warp.fibers[0]);
    }
}

inline void start(Warp &warp, unsigned first, unsigned count, bool backwards)
{
    warp.count = 0;
    for (unsigned number = 0; number < count; number++) {
        if (pool.empty())
            pool.push_back(new Fiber);
        Fiber *fiber = pool.back();
        pool.pop_back();
        fiber->thread = first + (backwards ? count - 1 - number : number);
        fiber->exchanges = 0;
        warp.add(fiber);
    }
    go_on(warp);
}

inline void run_block(bool backwards)
{
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z, warps = (threads + WARP - 1) / WARP;
    static std::vector<Warp> waiting;
    waiting.resize(warps);
    for (unsigned number = 0; number < warps; number++) {
        const unsigned first = (backwards ? warps - 1 - number : number) * WARP;
        start(waiting[number], first, std::min(WARP, threads - first), backwards);
    }
    for (;;) {
        unsigned left = 0;
        const Fiber *one = nullptr;
        for (const Warp &warp : waiting) {
            left += warp.count;
            one = warp.count ? warp.fibers[0] : one;
        }
        if (!left)
            return;
        for (const Warp &warp : waiting)
            for (unsigned number = 0; number < warp.count; number++)
                check(left == threads, warp.fibers[number], one);
        for (Warp &warp : waiting)
            if (warp.count)
                go_on(warp);
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
