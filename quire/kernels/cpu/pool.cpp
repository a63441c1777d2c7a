// A pool of threads that share an index range piece by piece. A thread that the system does not schedule holds nobody
// up: the others take its pieces. Workers spin for a moment after a job, then sleep; idle costs nothing.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define QUIRE_PAUSE() _mm_pause()
#else
#define QUIRE_PAUSE() std::this_thread::yield()
#endif

namespace quire {
namespace {

constexpr auto SPIN = std::chrono::microseconds(100);  // longer than what lies between two calls of one step

// One word says it all, so that a piece is claimed by one exchange: the job's number, the next piece, the pieces.
struct Ticket {
    uint32_t job;
    uint16_t next, pieces;
};
uint64_t pack(Ticket t) { return (uint64_t)t.job << 32 | (uint64_t)t.next << 16 | t.pieces; }
Ticket unpack(uint64_t w) { return {(uint32_t)(w >> 32), (uint16_t)(w >> 16), (uint16_t)w}; }

class Pool {
   public:
    ~Pool() { stop(); }

    void resize(int count) {
        std::lock_guard<std::mutex> owner(owner_);
        stop();
        stopping_ = false;
        for (int i = 1; i < count; ++i) threads_.emplace_back([this] { work(); });
    }

    int size() const { return (int)threads_.size() + 1; }

    void run(int64_t count, int64_t grain, Body body, const void* context) {
        int64_t pieces = count / (grain < 1 ? 1 : grain);
        const int64_t most = 8 * size();
        pieces = pieces < most ? pieces : most;
        // A second caller at the same time works alone, as does one that asks from within a piece.
        if (pieces <= 1 || threads_.empty() || !owner_.try_lock()) {
            if (count > 0) body(context, 0, count);
            return;
        }
        count_ = count;
        body_ = body;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        const Ticket ticket{++job_, 0, (uint16_t)pieces};
        ticket_.store(pack(ticket), std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        while (take_piece()) {
        }
        for (int spin = 0; done_.load(std::memory_order_acquire) != pieces; ++spin) {
            if (spin < 2000)
                QUIRE_PAUSE();
            else
                std::this_thread::yield();
        }
        owner_.unlock();
    }

   private:
    // A claimed piece keeps `run` from returning, so what it describes stays valid until it is done.
    bool take_piece() {
        uint64_t word = ticket_.load(std::memory_order_acquire);
        for (;;) {
            Ticket ticket = unpack(word);
            if (ticket.next >= ticket.pieces) return false;
            const int64_t piece = ticket.next++;
            if (!ticket_.compare_exchange_weak(word, pack(ticket), std::memory_order_acq_rel)) continue;
            body_(context_, count_ * piece / ticket.pieces, count_ * (piece + 1) / ticket.pieces);
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }

    bool open() const {
        const Ticket ticket = unpack(ticket_.load(std::memory_order_seq_cst));
        return ticket.next < ticket.pieces;
    }

    void work() {
        while (true) {
            while (take_piece()) {
            }
            const auto limit = std::chrono::steady_clock::now() + SPIN;
            bool found = false;
            while (!found && std::chrono::steady_clock::now() < limit) {
                for (int i = 0; i < 16 && !found; ++i) {
                    QUIRE_PAUSE();
                    found = open();
                }
            }
            if (found) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [this] { return stopping_ || open(); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            if (stopping_) return;
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

    std::vector<std::thread> threads_;
    std::mutex owner_;  // held by whoever runs a job
    std::mutex mutex_;  // guards sleeping
    std::condition_variable wake_;
    bool stopping_ = false;
    uint32_t job_ = 0;
    int64_t count_ = 0;
    Body body_ = nullptr;
    const void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
};

Pool& pool() {
    static Pool instance;
    return instance;
}

struct Scratch {
    void* memory = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(memory); }
};

}  // namespace

void run_pieces(int64_t count, int64_t grain, Body body, const void* context) { pool().run(count, grain, body, context); }

void set_threads(int count) { pool().resize(count); }

int num_threads() { return pool().size(); }

bool converts_beside_fma() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

void* scratch(int slot, size_t bytes) {
    thread_local Scratch slots[SCRATCH_SLOTS];
    Scratch& mine = slots[slot];
#ifdef __SANITIZE_ADDRESS__
    // Nothing is left over from other calls, nor beyond what was asked for.
    std::free(mine.memory);
    mine.memory = nullptr;
    if (posix_memalign(&mine.memory, 64, bytes)) std::abort();
    return mine.memory;
#endif
    if (mine.size < bytes) {
        std::free(mine.memory);
        mine.size = (bytes + bytes / 4 + 63) / 64 * 64;
        mine.memory = std::aligned_alloc(64, mine.size);
        if (!mine.memory) std::abort();
    }
    return mine.memory;
}

}  // namespace quire
