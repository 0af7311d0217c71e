// A double of the CUDA driver for tests on machines without a GPU: those functions that the trainer calls, over host
// memory, with the kernels run by on_cpu.h. What it accepts, a driver may refuse, and the other way round. It is strict
// where that is cheap: memory begins as NaN and ends at a page that cannot be touched, copies must stay within one
// allocation, a call needs a context, and a module must be code for a GPU that has the kernel in it.
//
// FAKE_CUDA, names and numbers separated by commas, says how it shall be: `devices=2`, `version=13000` (CUDA's number),
// `memory=1000000` (bytes), `fail=40` (the launch that goes wrong), `backwards=1` (the order of threads), `graphs=0`
// (nothing can be captured), `pinned=0` (there is no pinned memory), `deaf=1` (no stream waits for another), `tell=1` (each
// copy to or from pinned memory is told of on standard error).
//
// Copies to and from pinned memory are made as late as can be: when their stream does something else, when another stream
// waits for them, or a thread does, and for that not before 500 launches more, or before everybody else has been idle for
// a while. So what should have waited for one, and did not, finds wrong numbers.

#include "on_cpu.h"

#include "../../../kernels/product.cu"
#undef THREADS
#include "../../../kernels/sums.cu"
#undef THREADS
#include "../../../kernels/loss.cu"
#undef THREADS
#include "../../../kernels/adamw.cu"
#undef THREADS
#undef ACROSS
#include "../../../kernels/rows.cu"
#undef THREADS
#undef WARP
#undef DEPTH
#include "../../../kernels/attention.cu"
#undef THREADS

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <elf.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
              INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
              NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, NOT_CAPTURING = 905 };

using Pointer = unsigned long long;
using Work = std::function<void()>;
using Call = std::function<Work(void **)>;

// What copies the arguments that a launch points to, into a call of the kernel with them.
template <class... A, size_t... I> Call caller(void (*kernel)(A...), std::index_sequence<I...>)
{
    return [kernel](void **given) -> Work {
        std::tuple<std::decay_t<A>...> copies(*static_cast<std::decay_t<A> *>(given[I])...);
        return [kernel, copies] { std::apply(kernel, copies); };
    };
}
template <class... A> Call caller(void (*kernel)(A...)) { return caller(kernel, std::index_sequence_for<A...>()); }

#define KERNEL(name) {#name, caller(name)}
const std::map<std::string, Call> kernels = {KERNEL(product), KERNEL(follow),
                                             KERNEL(round_to_bf16), KERNEL(add), KERNEL(sum_rows), KERNEL(sum_all),
                                             KERNEL(sum_squares), KERNEL(cross_entropy), KERNEL(adamw),
                                             KERNEL(layer_norm), KERNEL(layer_norm_slope), KERNEL(layer_norm_chunks),
                                             KERNEL(sum_chunks), KERNEL(gelu), KERNEL(gelu_slope), KERNEL(embed),
                                             KERNEL(embed_slope), KERNEL(attention_64), KERNEL(attention_queries_64),
                                             KERNEL(attention_keys_64), KERNEL(attention_128),
                                             KERNEL(attention_queries_128), KERNEL(attention_keys_128)};

std::mutex whole;
// A late copy was made.
std::condition_variable changed;
bool initialized;
thread_local void *current;
int context;
// Where each begins, its bytes, and its mapping.
std::map<Pointer, std::tuple<size_t, void *, size_t>> allocations;
size_t allocated;
long launches;
// Of a launch: a real driver tells it at a later call, and never works again.
Result broken = SUCCESS;
using Graph = std::vector<Work>;
// A copy that is not made yet.
struct Late {
    Pointer device;
    const char *host;
    size_t bytes;
    // How many launches there were when it was asked for.
    long asked;
    Work copy;
};
// A stream's work is done in the call that asks for it, but for late copies, and for what the stand-in for NCCL puts on
// it: that counts here what it was given and what has ended (`Stream` in trainer/fake-nccl, which knows of these two
// alone).
struct Stream {
    std::atomic<uint64_t> enqueued{0}, ended{0};
    // What was asked for while it captures, and whether something was that a graph cannot hold.
    Graph *captured = nullptr;
    bool spoiled = false;
    std::deque<Late> late;
    // Late copies that were made.
    uint64_t made = 0;
};
std::vector<Stream *> streams;
// Where pinned memory begins, and its bytes.
std::map<const char *, size_t> pinned;
// Calls that were work: others than waiting and asking.
long calls;

long setting(const char *name, long otherwise)
{
    const char *all = getenv("FAKE_CUDA");
    const std::string wanted = std::string(name) + "=";
    const char *found = all ? strstr(all, wanted.c_str()) : nullptr;
    return found ? atol(found + wanted.size()) : otherwise;
}

// What every call within a context begins with.
Result ready()
{
    if (!initialized)
        return NOT_INITIALIZED;
    return current ? broken : INVALID_CONTEXT;
}

// Makes a stream's late copies, up to so many in all.
void catch_up(Stream *stream, const char *since, uint64_t up_to = UINT64_MAX)
{
    while (stream && stream->made < up_to && !stream->late.empty()) {
        const Late late = stream->late.front();
        stream->late.pop_front();
        stream->made++;
        if (setting("tell", 0))
            fprintf(stderr, "double: %zu bytes were copied after %ld launches, since %s\n", late.bytes,
                    launches - late.asked, since);
        late.copy();
        changed.notify_all();
    }
}

bool overlap(Pointer a, size_t bytes, Pointer b, size_t more) { return a < b + more && b < a + bytes; }

// Memory goes: nothing may be about to copy from it or to it.
void unused(Pointer device, const void *host, size_t bytes)
{
    for (const Stream *stream : streams)
        for (const Late &late : stream->late)
            if (overlap(late.device, late.bytes, device, bytes) ||
                overlap((Pointer)late.host, late.bytes, (Pointer)host, bytes)) {
                fprintf(stderr, "double: memory is freed that a copy is to be made from or to\n");
                abort();
            }
}

bool is_pinned(const void *host, size_t bytes)
{
    auto found = pinned.upper_bound((const char *)host);
    return found != pinned.begin() && (--found, (const char *)host + bytes <= found->first + found->second);
}

// Does a stream's work, now or in each replay.
Result enqueue(Stream *stream, Work work)
{
    calls++;
    catch_up(stream, "its stream goes on");
    if (stream->captured)
        stream->captured->push_back(work);
    else
        work();
    return SUCCESS;
}

// The same for what counts as a launch.
Result launch(Stream *stream, Work work)
{
    return enqueue(stream, [=] {
        if (broken || ++launches == setting("fail", 0))
            broken = ILLEGAL_ADDRESS;
        else
            work();
    });
}

// What a capture cannot hold. (A real one holds copies from the host, and reads its memory at each replay.)
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
    std::lock_guard<std::mutex> held(whole);
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

Result release(Pointer pointer, Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    if (Result wrong = outside(stream))
        return wrong;
    auto found = allocations.find(pointer);
    if (found == allocations.end())
        return INVALID_VALUE;
    auto [bytes, mapped, length] = found->second;
    catch_up(stream, "its stream goes on");
    unused(pointer, nullptr, bytes);
    munmap(mapped, length);
    allocated -= bytes;
    allocations.erase(found);
    return broken;
}

Result copy(void *to, const void *from, size_t bytes, Pointer device, Pointer other, Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    if (Result wrong = ready())
        return wrong;
    if (!within(device, bytes) || (other && !within(other, bytes)))
        return INVALID_VALUE;
    if (!other)
        if (Result wrong = outside(stream))
            return wrong;
    const char *host = other ? nullptr : (const char *)(device == (Pointer)to ? from : to);
    if (host && is_pinned(host, bytes)) {
        calls++;
        stream->late.push_back({device, host, bytes, launches, [=] { memcpy(to, from, bytes); }});
        return SUCCESS;
    }
    return enqueue(stream, [=] { memcpy(to, from, bytes); });
}

struct Module {
    std::string image;
};

struct Event {
    Stream *stream = nullptr;
    uint64_t after = 0;
    // The stream's late copies before it.
    uint64_t made = 0;
    bool is_past() const { return !stream || stream->ended >= after; }
    bool is_caught_up() const { return !stream || stream->made >= made; }
};

// Whoever waits for NCCL's work without looking at anything else may wait for ever. And to do more behind it is more than
// this double can.
Result idle(const Stream *stream) { return stream->ended < stream->enqueued ? NOT_READY : SUCCESS; }

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
CUDA cuCtxSynchronize() { return ready(); }
CUDA cuStreamCreate(Stream **stream, unsigned)
{
    std::lock_guard<std::mutex> held(whole);
    streams.push_back(*stream = new Stream);
    return ready();
}
CUDA cuEventCreate(Event **event, unsigned) { return *event = new Event, ready(); }
CUDA cuEventRecord(Event *event, Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    event->stream = stream;
    event->after = stream->enqueued;
    event->made = stream->made + stream->late.size();
    return ready();
}
CUDA cuEventQuery(const Event *event)
{
    std::lock_guard<std::mutex> held(whole);
    if (Result wrong = ready())
        return wrong;
    return event->is_past() && event->is_caught_up() ? SUCCESS : NOT_READY;
}
// Of late copies alone: nobody may wait so for NCCL's work.
CUDA cuEventSynchronize(Event *event)
{
    std::unique_lock<std::mutex> held(whole);
    const long enough = launches + 500;
    while (!event->is_caught_up() && !broken) {
        const long before = calls;
        changed.wait_for(held, std::chrono::milliseconds(300), [&] { return event->is_caught_up(); });
        if (calls == before || launches >= enough)
            catch_up(event->stream, "a thread waits", event->made);
    }
    if (Result wrong = ready())
        return wrong;
    return event->is_past() ? SUCCESS : NOT_READY;
}
CUDA cuStreamWaitEvent(Stream *stream, Event *event, unsigned)
{
    std::lock_guard<std::mutex> held(whole);
    if (Result wrong = ready())
        return wrong;
    if (Result wrong = outside(stream))
        return wrong;
    if (!event->is_past())
        return NOT_READY;
    if (!setting("deaf", 0))
        catch_up(event->stream, "another stream waits", event->made);
    return SUCCESS;
}
CUDA cuEventDestroy_v2(Event *event) { return delete event, SUCCESS; }
// It stays, since an event may be of it.
CUDA cuStreamDestroy_v2(Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    return catch_up(stream, "its stream ends"), ready();
}
CUDA cuStreamSynchronize(Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    catch_up(stream, "a thread waits for its stream");
    if (Result wrong = outside(stream))
        return wrong;
    const Result wrong = idle(stream);
    return wrong ? wrong : ready();
}
CUDA cuMemAlloc_v2(Pointer *pointer, size_t bytes) { return allocate(pointer, bytes, nullptr); }
CUDA cuMemAllocAsync(Pointer *pointer, size_t bytes, Stream *stream) { return allocate(pointer, bytes, stream); }
CUDA cuMemFree_v2(Pointer pointer) { return release(pointer, nullptr); }
CUDA cuMemFreeAsync(Pointer pointer, Stream *stream) { return release(pointer, stream); }
CUDA cuMemHostAlloc(void **memory, size_t bytes, unsigned)
{
    std::lock_guard<std::mutex> held(whole);
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
    std::lock_guard<std::mutex> held(whole);
    auto found = pinned.find((const char *)memory);
    if (found == pinned.end())
        return INVALID_VALUE;
    unused(0, memory, found->second);
    pinned.erase(found);
    free(memory);
    return broken;
}
CUDA cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    if (Result wrong = ready())
        return wrong;
    if (!within(to, bytes))
        return INVALID_VALUE;
    return enqueue(stream, [=] { memset((void *)to, value, bytes); });
}
CUDA cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, Stream *stream)
{
    return copy((void *)to, from, bytes, to, 0, stream);
}
CUDA cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, Stream *stream)
{
    return copy(to, (void *)from, bytes, from, 0, stream);
}
CUDA cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream *stream)
{
    if (Result wrong = idle(stream))
        return wrong;
    return copy((void *)to, (void *)from, bytes, to, from, stream);
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
    std::lock_guard<std::mutex> held(whole);
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
    std::lock_guard<std::mutex> held(whole);
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
    std::lock_guard<std::mutex> held(whole);
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
CUDA cuGraphInstantiateWithFlags(Graph **made, const Graph *graph, unsigned long long)
{
    return *made = new Graph(*graph), ready();
}
CUDA cuGraphLaunch(const Graph *graph, Stream *stream)
{
    std::lock_guard<std::mutex> held(whole);
    if (Result wrong = ready())
        return wrong;
    if (Result wrong = outside(stream))
        return wrong;
    calls++;
    catch_up(stream, "its stream goes on");
    for (const Work &work : *graph)
        work();
    return SUCCESS;
}
CUDA cuGraphExecDestroy(Graph *graph) { return delete graph, SUCCESS; }
CUDA cuGraphDestroy(Graph *graph) { return delete graph, SUCCESS; }
// For the double of cuBLASLt: a launch of `work` with `data`, and how to be rid of that; and whether memory is there.
CUDA fakeEnqueue(Stream *stream, void (*work)(void *), void *data, void (*drop)(void *))
{
    std::lock_guard<std::mutex> held(whole);
    const std::shared_ptr<void> kept(data, drop);
    if (Result wrong = ready())
        return wrong;
    return launch(stream, [=] { work(kept.get()); });
}
extern "C" __attribute__((visibility("default"))) bool fakeWithin(Pointer pointer, size_t bytes)
{
    std::lock_guard<std::mutex> held(whole);
    return within(pointer, bytes);
}
CUDA cuGetErrorString(int code, const char **text) { return *text = words(code), SUCCESS; }
CUDA cuGetErrorName(int code, const char **text) { return *text = words(code), SUCCESS; }
