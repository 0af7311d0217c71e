// A double of the CUDA driver for tests on machines without a GPU: the functions that the trainer calls, over host
// memory, with the kernels run by on_cpu.h. A real driver may refuse what the double accepts, and the other way round.
// The double is strict where that is cheap: memory begins as NaN and ends at a page that cannot be touched, copies must
// stay within one allocation, a call needs a context, and a module must be code for a GPU that contains the kernel. A
// stream's work is done later, by a thread of the double: whoever reads a result without waiting for it finds the old
// one.
//
// FAKE_CUDA changes the double, by names and numbers separated by commas: `devices=2`, `version=13000` (CUDA's number),
// `memory=1000000` (bytes), `fail=40` (the launch that fails), `hang=40` (the launch that never ends), `backwards=1` (the order of threads), `graphs=0`
// (nothing can be captured), `overlap=1` (work after an event waits until NCCL's stand-in has ended an operation that
// it was given later; so a caller that waits for all the work before it calls NCCL waits for ever), `pinned=0` (there
// is no pinned memory), `deaf=1` (no stream waits for another), `tell=1` (each copy to or from pinned memory is
// reported on standard error).

#include "on_cpu.h"

#include "device.h"

#include "kernels.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <elf.h>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
              INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
              NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, NOT_CAPTURING = 905 };

bool initialized;
thread_local void *current;
int context;
// By the begin of an allocation: its bytes, and its mapping.
std::map<Pointer, std::tuple<size_t, void *, size_t>> allocations;
size_t allocated;
// By the begin of pinned memory: its bytes.
std::map<const char *, size_t> pinned;
// The error of a launch. A real driver returns it from a later call, and from all calls after that.
std::atomic<Result> broken{SUCCESS};

long setting(const char *name, long otherwise)
{
    const char *all = getenv("FAKE_CUDA");
    const std::string wanted = std::string(name) + "=";
    const char *found = all ? strstr(all, wanted.c_str()) : nullptr;
    return found ? atol(found + wanted.size()) : otherwise;
}

// The check at the begin of each call within a context.
Result ready()
{
    if (!initialized)
        return NOT_INITIALIZED;
    return current ? broken.load() : INVALID_CONTEXT;
}

// Puts work on a stream that counts as a launch.
Result launch(Stream *stream, Work work)
{
    enqueue(stream, [=] {
        const long number = broken ? 0 : ++launches;
        while (number && number == setting("hang", 0) && !device.ends)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (!broken && number != setting("fail", 0))
            return work();
        broken = ILLEGAL_ADDRESS;
        // After this no work waits for anything.
        Held held(whole);
        for (Stream *stream : streams)
            stream->gates.clear();
    });
    return SUCCESS;
}

// For work that cannot be in a capture. (In a real one copies from the host can be: each replay reads the host's
// memory.)
Result outside(Stream *stream)
{
    if (!stream || !stream->captured)
        return SUCCESS;
    stream->spoiled = true;
    return CAPTURE_UNSUPPORTED;
}

bool within(Pointer pointer, size_t bytes)
{
    auto found = allocations.upper_bound(pointer);
    if (found == allocations.begin())
        return bytes == 0;
    --found;
    return pointer + bytes <= found->first + std::get<0>(found->second);
}

Result allocate(Pointer *pointer, size_t bytes, Stream *stream)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (bytes == 0)
        return INVALID_VALUE;
    if (Result wrong = outside(stream))
        return wrong;
    if (allocated + bytes > (size_t)setting("memory", 1L << 32))
        return OUT_OF_MEMORY;
    const size_t page = sysconf(_SC_PAGESIZE), rounded = (bytes + 15) / 16 * 16, pages = (rounded + page - 1) / page * page;
    char *mapped = (char *)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return OUT_OF_MEMORY;
    mprotect(mapped + pages, page, PROT_NONE);
    memset(mapped, 0xff, pages);
    *pointer = (Pointer)(mapped + pages - rounded);
    allocations[*pointer] = {bytes, mapped, pages + page};
    allocated += bytes;
    return SUCCESS;
}

// Memory is freed: no copy from or to it may be left to do.
void unused(const std::function<bool(const Task &)> &is_of)
{
    for (const Stream *stream : streams)
        if (std::any_of(stream->tasks.begin(), stream->tasks.end(), is_of)) {
            fprintf(stderr, "double: memory is freed that a copy is to be made from or to\n");
            abort();
        }
}

Result release(Pointer pointer, Stream *stream)
{
    Held held(whole);
    if (Result wrong = outside(stream))
        return wrong;
    auto found = allocations.find(pointer);
    if (found == allocations.end())
        return INVALID_VALUE;
    const auto [bytes, mapped, length] = found->second;
    const auto unmap = [pointer, bytes = bytes, mapped = mapped, length = length] {
        unused([=](const Task &task) { return task.is_of(pointer, bytes); });
        munmap(mapped, length);
    };
    allocated -= bytes;
    allocations.erase(found);
    // Earlier work still uses the memory.
    if (!stream) {
        drain(held);
        unmap();
        return broken;
    }
    enqueue(stream, [=] {
        Held held(whole);
        unmap();
    });
    return broken;
}

// The check at the begin of each copy. A copy from or to the host cannot be in a graph.
Result may_copy(Pointer one, Pointer other, size_t bytes, Stream *stream)
{
    if (Result wrong = ready())
        return wrong;
    if (!within(one, bytes) || (other && !within(other, bytes)))
        return INVALID_VALUE;
    return other ? SUCCESS : outside(stream);
}

// Makes a copy late if its host memory is pinned.
bool is_late(Stream *stream, Pointer device, const void *host, size_t bytes, Work copy)
{
    auto found = pinned.upper_bound((const char *)host);
    if (found == pinned.begin() || (--found, (const char *)host + bytes > found->first + found->second))
        return false;
    tells = setting("tell", 0);
    enqueue(stream, Task{copy, nullptr, 0, bytes, device, host});
    return true;
}

struct Module {
    std::string image;
};

struct Event {
    Stream *stream = nullptr;
    // How much of all work, NCCL's included, precedes the event; and how much of this double's work.
    uint64_t after = 0, own = 0;
    // Whether it marks the end of a piece of work, behind which NCCL has nothing to do.
    bool of_end = false;
    // Of a thread that looks again and again: the launches that end the lateness of copies, and since when all are idle.
    long enough = -1, moved = -1;
    std::chrono::steady_clock::time_point idle_since;

    // Whether late copies before it are made now, as for a thread that waits.
    bool ends_lateness()
    {
        if (enough < 0)
            enough = launches + 500;
        const auto now = std::chrono::steady_clock::now();
        if (std::exchange(moved, requests + launches) != requests + launches)
            idle_since = now;
        return launches >= enough || broken || now - idle_since > std::chrono::milliseconds(300);
    }
};

// Who waits only for NCCL's work may wait for ever. And the double cannot put work of its own behind it.
Result idle(const Stream *stream) { return stream->of_nccl_ended() < stream->of_nccl() ? NOT_READY : SUCCESS; }

// Whether all work before the event has ended.
bool is_past(const Event *event) { return !event->stream || event->stream->ended >= event->after; }

const char *words(int code)
{
    switch (code) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_READY: return "device not ready";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case NOT_SUPPORTED: return "operation not supported";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    default: return "an error of the driver's double";
    }
}

} // namespace

#define CUDA extern "C" __attribute__((visibility("default"))) int

CUDA cuInit(unsigned) { return initialized = true, setting("devices", 1) > 0 ? SUCCESS : NO_DEVICE; }
CUDA cuDriverGetVersion(int *version) { return *version = setting("version", 13000), SUCCESS; }
CUDA cuDeviceGetCount(int *count) { return *count = setting("devices", 1), SUCCESS; }
CUDA cuDeviceGet(int *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= setting("devices", 1))
        return INVALID_DEVICE;
    return *device = ordinal, SUCCESS;
}
CUDA cuDeviceGetName(char *name, int length, int)
{
    return snprintf(name, length, "a double of a GPU, on the CPU"), SUCCESS;
}
CUDA cuDeviceGetAttribute(int *value, int attribute, int)
{
    // Compute capability 9.0, with memory pools and 132 processors.
    *value = attribute == 75 ? 9 : attribute == 115 ? 1 : attribute == 16 ? 132 : 0;
    return SUCCESS;
}
CUDA cuDevicePrimaryCtxRetain(void **made, int) { return *made = &context, SUCCESS; }
CUDA cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
CUDA cuCtxGetCurrent(void **found) { return *found = current, SUCCESS; }
CUDA cuCtxSetCurrent(void *chosen) { return current = chosen, SUCCESS; }
CUDA cuCtxSynchronize()
{
    Held held(whole);
    drain(held);
    return ready();
}
CUDA cuStreamCreate(Stream **stream, unsigned)
{
    Held held(whole);
    return streams.insert(*stream = new Stream), ready();
}
CUDA cuEventCreate(Event **event, unsigned flags)
{
    const unsigned blocking_sync = 1;
    *event = new Event;
    (*event)->of_end = flags & blocking_sync;
    return ready();
}
CUDA cuEventRecord(Event *event, Stream *stream)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (Result wrong = outside(stream))
        return wrong;
    event->stream = stream;
    event->after = stream->enqueued;
    event->own = stream->own;
    event->enough = event->moved = -1;
    if (setting("overlap", 0) && !event->of_end && !stream->of_nccl()) {
        // Each event that has not been reached waits for one more operation of NCCL.
        const uint64_t last = stream->gates.empty() ? 0 : stream->gates.rbegin()->second;
        stream->gates[stream->own] = std::max(last, nccl_ended()) + 1;
    }
    return SUCCESS;
}
CUDA cuEventQuery(Event *event)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (is_past(event))
        return SUCCESS;
    if (event->ends_lateness())
        want(event->stream, event->own, "a thread looks");
    return NOT_READY;
}
CUDA cuEventSynchronize(const Event *event)
{
    Held held(whole);
    if (Result wrong = event->stream ? idle(event->stream) : SUCCESS)
        return wrong;
    const long enough = launches + 500;
    while (!is_past(event)) {
        const long before = requests + launches;
        done.wait_for(held, std::chrono::milliseconds(300), [=] { return is_past(event) || launches >= enough; });
        if (requests + launches > before && launches < enough && !broken)
            continue;
        if (event->stream)
            want(event->stream, event->own, "a thread waits");
        done.wait(held, [=] { return is_past(event); });
    }
    return ready();
}
CUDA cuStreamWaitEvent(Stream *stream, const Event *event, unsigned)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (Result wrong = outside(stream))
        return wrong;
    if (!event->stream || setting("deaf", 0))
        return SUCCESS;
    if (Result wrong = idle(event->stream))
        return wrong;
    return enqueue(stream, Task{nullptr, event->stream, event->after}), SUCCESS;
}
CUDA cuEventDestroy_v2(Event *event) { return delete event, SUCCESS; }
CUDA cuStreamDestroy_v2(Stream *stream)
{
    Held held(whole);
    drain(stream, held);
    streams.erase(stream);
    // The stream is kept, since an event may name it.
    return ready();
}
CUDA cuStreamSynchronize(Stream *stream)
{
    Held held(whole);
    if (Result wrong = outside(stream))
        return wrong;
    if (Result wrong = idle(stream))
        return wrong;
    drain(stream, held);
    return ready();
}
CUDA cuStreamQuery(Stream *stream)
{
    Held held(whole);
    if (Result wrong = outside(stream))
        return wrong;
    want(stream, stream->own, "a thread looks");
    return stream->own_ended < stream->own ? NOT_READY : ready();
}
CUDA cuMemAlloc_v2(Pointer *pointer, size_t bytes) { return allocate(pointer, bytes, nullptr); }
CUDA cuMemAllocAsync(Pointer *pointer, size_t bytes, Stream *stream) { return allocate(pointer, bytes, stream); }
CUDA cuMemFree_v2(Pointer pointer) { return release(pointer, nullptr); }
CUDA cuMemFreeAsync(Pointer pointer, Stream *stream) { return release(pointer, stream); }
CUDA cuMemHostAlloc(void **memory, size_t bytes, unsigned)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (!setting("pinned", 1))
        return OUT_OF_MEMORY;
    const size_t page = sysconf(_SC_PAGESIZE);
    if (!(*memory = aligned_alloc(page, (bytes + page - 1) / page * page)))
        return OUT_OF_MEMORY;
    memset(*memory, 0xff, bytes);
    pinned[(const char *)*memory] = bytes;
    return SUCCESS;
}
CUDA cuMemFreeHost(void *memory)
{
    Held held(whole);
    const auto found = pinned.find((const char *)memory);
    if (found == pinned.end())
        return INVALID_VALUE;
    const size_t bytes = found->second;
    unused([=](const Task &task) { return task.is_of(memory, bytes); });
    pinned.erase(found);
    free(memory);
    return broken;
}
CUDA cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, Stream *stream)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (!within(to, bytes))
        return INVALID_VALUE;
    return enqueue(stream, [=] { memset((void *)to, value, bytes); }), SUCCESS;
}
CUDA cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, Stream *stream)
{
    Held held(whole);
    if (Result wrong = may_copy(to, 0, bytes, stream))
        return wrong;
    if (is_late(stream, to, from, bytes, [=] { memcpy((void *)to, from, bytes); }))
        return SUCCESS;
    // The host may change its memory as soon as this returns.
    const std::string staged((const char *)from, bytes);
    return enqueue(stream, [=] { memcpy((void *)to, staged.data(), bytes); }), SUCCESS;
}
CUDA cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, Stream *stream)
{
    Held held(whole);
    if (Result wrong = may_copy(from, 0, bytes, stream))
        return wrong;
    if (is_late(stream, from, to, bytes, [=] { memcpy(to, (void *)from, bytes); }))
        return SUCCESS;
    enqueue(stream, [=] { memcpy(to, (void *)from, bytes); });
    drain(stream, held);
    return ready();
}
CUDA cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream *stream)
{
    Held held(whole);
    if (Result wrong = idle(stream))
        return wrong;
    if (Result wrong = may_copy(from, to, bytes, stream))
        return wrong;
    return enqueue(stream, [=] { memcpy((void *)to, (void *)from, bytes); }), SUCCESS;
}
CUDA cuModuleLoadData(Module **module, const void *image)
{
    if (Result wrong = ready())
        return wrong;
    const auto *header = (const Elf64_Ehdr *)image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_machine != EM_CUDA)
        return INVALID_IMAGE;
    const size_t sections = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    const size_t segments = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    *module = new Module{std::string((const char *)image, std::max(sections, segments))};
    return SUCCESS;
}
CUDA cuModuleUnload(Module *module) { return delete module, SUCCESS; }
CUDA cuModuleGetFunction(const Call **function, Module *module, const char *name)
{
    const auto found = kernels.find(name);
    const std::string section = std::string(".text.") + name + '\0';
    if (found == kernels.end() || module->image.find(section) == std::string::npos)
        return NOT_FOUND;
    return *function = &found->second, SUCCESS;
}
CUDA cuLaunchKernel(const Call *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned, Stream *stream, void **arguments, void **)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (Result wrong = idle(stream))
        return wrong;
    const Index grid = {gx, gy, gz}, block = {bx, by, bz};
    if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || bx * by * bz > 1024)
        return INVALID_VALUE;
    const Work call = (*function)(arguments);
    return launch(stream, [=] { on_cpu::run(grid, block, call, setting("backwards", 0)); });
}
CUDA cuStreamBeginCapture_v2(Stream *stream, int)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (stream->captured || !setting("graphs", 1))
        return NOT_SUPPORTED;
    stream->captured = new Graph;
    stream->spoiled = false;
    return SUCCESS;
}
CUDA cuStreamEndCapture(Stream *stream, Graph **graph)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (!stream->captured)
        return NOT_CAPTURING;
    *graph = stream->captured;
    stream->captured = nullptr;
    if (!stream->spoiled)
        return SUCCESS;
    delete *graph;
    *graph = nullptr;
    return CAPTURE_INVALIDATED;
}
// A graph that is destroyed while it runs is finished first.
CUDA cuGraphInstantiateWithFlags(std::shared_ptr<Graph> **made, const Graph *graph, unsigned long long)
{
    return *made = new std::shared_ptr<Graph>(new Graph(*graph)), ready();
}
CUDA cuGraphLaunch(const std::shared_ptr<Graph> *launched, Stream *stream)
{
    Held held(whole);
    if (Result wrong = ready())
        return wrong;
    if (Result wrong = outside(stream))
        return wrong;
    enqueue(stream, [graph = *launched] {
        for (const Work &work : *graph)
            work();
    });
    return SUCCESS;
}
CUDA cuGraphExecDestroy(std::shared_ptr<Graph> *graph) { return delete graph, SUCCESS; }
CUDA cuGraphDestroy(Graph *graph) { return delete graph, SUCCESS; }
// For the double of cuBLASLt: a launch of `work` with `data`, and what frees `data`; and whether memory is allocated.
CUDA fakeEnqueue(Stream *stream, void (*work)(void *), void *data, void (*drop)(void *))
{
    Held held(whole);
    const std::shared_ptr<void> kept(data, drop);
    if (Result wrong = ready())
        return wrong;
    return launch(stream, [=] { work(kept.get()); });
}
extern "C" __attribute__((visibility("default"))) bool fakeWithin(Pointer pointer, size_t bytes)
{
    Held held(whole);
    return within(pointer, bytes);
}
CUDA cuGetErrorString(int code, const char **text) { return *text = words(code), SUCCESS; }
CUDA cuGetErrorName(int code, const char **text) { return *text = words(code), SUCCESS; }
