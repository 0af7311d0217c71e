// The device of the driver's double: its streams, and the one thread that does their work, beside those that ask for it.
// Not for what the work is.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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

// Held by whoever is at anything of the double, but not while work is done.
std::mutex whole;
using Held = std::unique_lock<std::mutex>;

using Graph = std::vector<Work>;
// What a stream was given and what has ended, in order. The stand-in for NCCL puts work on it, too, and does that itself
// (`Stream` in trainer/fake-nccl, which knows of these two alone).
struct Stream {
    std::atomic<uint64_t> enqueued{0}, ended{0};
    // This double's part of it: what is left of it, how much there was, and how much has ended.
    std::deque<Work> works;
    uint64_t own = 0, own_ended = 0;
    // How many operations of NCCL's must have ended before the works in these places (`overlap=1`).
    std::map<uint64_t, uint64_t> gates;
    // What was asked for while it captures, and whether something was that a graph cannot hold.
    Graph *captured = nullptr;
    bool spoiled = false;

    uint64_t of_nccl() const { return enqueued - own; }
    uint64_t of_nccl_ended() const { return ended - own_ended; }
};
std::set<Stream *> streams;
// Told when a stream has work, and when one has done some.
std::condition_variable asked, done;

uint64_t nccl_ended()
{
    return std::accumulate(streams.begin(), streams.end(), uint64_t{0},
                           [](uint64_t sum, const Stream *stream) { return sum + stream->of_nccl_ended(); });
}

// The device: one thread, which does the works of all streams, each stream's in order.
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
    void run()
    {
        Held held(whole);
        while (!ends) {
            const auto ready = [](const Stream *stream) { return !stream->works.empty() && is_open(stream); };
            const auto found = std::find_if(streams.begin(), streams.end(), ready);
            if (found == streams.end()) {
                const bool waits = std::any_of(streams.begin(), streams.end(),
                                               [](const Stream *stream) { return !stream->works.empty(); });
                // NCCL's stand-in tells nobody what it has ended.
                asked.wait_for(held, waits ? std::chrono::milliseconds(1) : std::chrono::hours(1));
                continue;
            }
            Stream *stream = *found;
            const Work work = std::move(stream->works.front());
            held.unlock();
            work();
            held.lock();
            stream->works.pop_front();
            stream->gates.erase(stream->own_ended);
            stream->own_ended++, stream->ended++;
            done.notify_all();
        }
    }
    // Before what it works with.
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

// Has a stream do this, once or in each replay.
void enqueue(Stream *stream, Work work)
{
    if (stream->captured) {
        stream->captured->push_back(work);
        return;
    }
    device.start();
    stream->works.push_back(work);
    stream->own++, stream->enqueued++;
    asked.notify_all();
}

// Waits until a stream has done what it was asked for here so far.
void drain(const Stream *stream, Held &held)
{
    const uint64_t all = stream->own;
    done.wait(held, [=] { return stream->own_ended >= all; });
}

// The same of all streams.
void drain(Held &held)
{
    for (const Stream *stream : std::set<Stream *>(streams))
        drain(stream, held);
}

} // namespace
