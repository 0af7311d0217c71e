// The device of the driver's double: its streams, and the thread that does their work. The work itself is in
// `driver.cpp`.
//
// A stream's work is done in order, but copies to and from pinned memory are made as late as possible: when their
// stream has more work behind them, when another stream waits for them, or when a thread waits for them. For a thread
// they are made only after 500 more launches, or once all others have been idle for a while. So whoever should have
// waited for a copy, and did not, finds wrong numbers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace {

using Work = std::function<void()>;

// Held during each access to the double's data, but not while work is done.
std::mutex whole;
using Held = std::unique_lock<std::mutex>;

using Graph = std::vector<Work>;
using Pointer = unsigned long long;
struct Stream;

// What a stream is asked for.
struct Task {
    Work work;
    // This task begins only after that other stream has ended so many tasks.
    const Stream *waits_for = nullptr;
    uint64_t after = 0;
    // For a late copy: its bytes and addresses, and how many launches there had been when its turn came.
    size_t late = 0;
    Pointer on_device = 0;
    const void *on_host = nullptr;
    long since = -1;

    bool is_of(Pointer begin, size_t bytes) const { return begin < on_device + late && on_device < begin + bytes; }
    bool is_of(const void *begin, size_t bytes) const
    {
        const auto *host = (const char *)on_host, *other = (const char *)begin;
        return other < host + late && host < other + bytes;
    }
};

// How much work a stream was given, and how much has ended, in order. The stand-in for NCCL puts work on it, too, and
// does that itself (`Stream` in trainer/cuda/fake-nccl, which knows only these two counters).
struct Stream {
    std::atomic<uint64_t> enqueued{0}, ended{0};
    // This double's part of the work: the tasks that are left, how many there were, and how many have ended.
    std::deque<Task> tasks;
    uint64_t own = 0, own_ended = 0;
    // Late copies before this position are made now, since a thread waits.
    uint64_t wanted = 0;
    const char *why = nullptr;
    // By position of a task: how many operations of NCCL must have ended before it begins (`overlap=1`).
    std::map<uint64_t, uint64_t> gates;
    // The work that was captured, and whether some of it cannot be in a graph.
    Graph *captured = nullptr;
    bool spoiled = false;

    uint64_t of_nccl() const { return enqueued - own; }
    uint64_t of_nccl_ended() const { return ended - own_ended; }
};
std::set<Stream *> streams;
// How many kernels have begun, and how many requests, other than queries, were made.
std::atomic<long> launches{0};
long requests;
// Whether late copies are reported on standard error.
bool tells;
// Notified when a stream gets work, and when one has done some.
std::condition_variable asked, done;

uint64_t nccl_ended()
{
    return std::accumulate(streams.begin(), streams.end(), uint64_t{0},
                           [](uint64_t sum, const Stream *stream) { return sum + stream->of_nccl_ended(); });
}

// The device: one thread that does the work of all streams, each stream's in order.
struct Device {
    std::thread thread;
    bool ends = false;

    void start()
    {
        if (!thread.joinable())
            thread = std::thread([this] { run(); });
    }
    static bool is_open(const Stream *stream)
    {
        const auto gate = stream->gates.begin();
        return gate == stream->gates.end() || gate->first > stream->own_ended || gate->second <= nccl_ended();
    }
    // Why a late copy is made now, if it is.
    static const char *lateness_ends(const Stream *stream)
    {
        if (std::any_of(stream->tasks.begin(), stream->tasks.end(), [](const Task &task) { return !task.late; }))
            return "its stream goes on";
        if (stream->own_ended < stream->wanted)
            return stream->why;
        const auto waits = [=](const Stream *other) {
            return !other->tasks.empty() && other->tasks.front().waits_for == stream &&
                   stream->ended < other->tasks.front().after;
        };
        return std::any_of(streams.begin(), streams.end(), waits) ? "another stream waits" : nullptr;
    }
    static bool is_ready(const Stream *stream)
    {
        if (stream->tasks.empty() || !is_open(stream))
            return false;
        const Task &next = stream->tasks.front();
        return !next.waits_for && (!next.late || lateness_ends(stream));
    }
    // Removes a task that has ended.
    static void end(Stream *stream)
    {
        stream->tasks.pop_front();
        stream->gates.erase(stream->own_ended);
        stream->own_ended++, stream->ended++;
        done.notify_all();
    }
    // Ends waits that are over, and records the launches at which a late copy's turn came. This must not depend on the
    // work of other streams.
    static void look(Stream *stream)
    {
        const auto &tasks = stream->tasks;
        while (!tasks.empty() && tasks.front().waits_for && is_open(stream) &&
               tasks.front().waits_for->ended >= tasks.front().after)
            end(stream);
        for (Task &task : stream->tasks) {
            if (!task.late)
                break;
            if (task.since < 0)
                task.since = launches;
        }
    }
    void run()
    {
        Held held(whole);
        while (!ends) {
            std::for_each(streams.begin(), streams.end(), look);
            const auto found = std::find_if(streams.begin(), streams.end(), is_ready);
            if (found == streams.end()) {
                const bool waits = std::any_of(streams.begin(), streams.end(),
                                               [](const Stream *stream) { return !stream->tasks.empty(); });
                // NCCL's stand-in does not notify anyone when its work ends.
                asked.wait_for(held, waits ? std::chrono::milliseconds(1) : std::chrono::hours(1));
                continue;
            }
            Stream *stream = *found;
            // The task stays at the front while it runs. New tasks are put behind it.
            const Task &task = stream->tasks.front();
            if (task.late && tells)
                fprintf(stderr, "double: %zu bytes were copied after %ld launches, since %s\n", task.late,
                        launches - task.since, lateness_ends(stream));
            held.unlock();
            task.work();
            held.lock();
            end(stream);
        }
    }
    // The thread must end before the data that it uses.
    ~Device()
    {
        {
            Held held(whole);
            ends = true;
        }
        asked.notify_all();
        if (thread.joinable())
            thread.join();
    }
} device;

void enqueue(Stream *stream, Task task)
{
    device.start();
    stream->tasks.push_back(std::move(task));
    stream->own++, stream->enqueued++;
    requests++;
    asked.notify_all();
}

// Puts work on a stream, or into the graph that the stream captures.
void enqueue(Stream *stream, Work work)
{
    if (stream->captured)
        stream->captured->push_back(work);
    else
        enqueue(stream, Task{work});
}

// Makes the device do a stream's late copies before a position.
void want(Stream *stream, uint64_t before, const char *why)
{
    if (stream->wanted < before) {
        stream->wanted = before;
        stream->why = why;
        asked.notify_all();
    }
}

// Waits until a stream has done the double's work that it has now.
void drain(Stream *stream, Held &held)
{
    const uint64_t all = stream->own;
    want(stream, all, "a thread waits for its stream");
    done.wait(held, [=] { return stream->own_ended >= all; });
}

// The same for all streams.
void drain(Held &held)
{
    for (Stream *stream : std::set<Stream *>(streams))
        drain(stream, held);
}

} // namespace
