// A pool of threads that share an index range piece by piece. A thread that the system does not schedule holds nobody
// up: the others take its pieces. Workers spin for a moment after a job, then sleep; idle costs nothing.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
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

class Pool {
   public:
    static Pool& instance() {
        static Pool pool;
        return pool;
    }

    void resize(int count) {
        stop();
        stopping_ = false;
        for (int i = 1; i < count; ++i) threads_.emplace_back([this] { work(); });
    }

    int size() const { return (int)threads_.size() + 1; }

    // Call f(begin, end) on pieces of [0, count), each about `grain` long, on all threads. Returns when all are done.
    template <class F>
    void run(int64_t count, int64_t grain, const F& f) {
        const int64_t most = 8 * size();
        int64_t pieces = count / (grain < 1 ? 1 : grain);
        pieces = pieces < most ? pieces : most;
        if (pieces <= 1 || threads_.empty()) {
            if (count > 0) f((int64_t)0, count);
            return;
        }
        Job job;
        job.count = count;
        job.pieces = pieces;
        job.context = &f;
        job.call = [](const void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); };
        {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = &job;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take_pieces(job);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = nullptr;  // nobody joins any more
        }
        for (int spin = 0; job.active.load(std::memory_order_acquire) != 0; ++spin)
            spin < 2000 ? QUIRE_PAUSE() : std::this_thread::yield();
    }

    ~Pool() { stop(); }

   private:
    struct Job {
        int64_t count, pieces;
        const void* context;
        void (*call)(const void*, int64_t, int64_t);
        std::atomic<int64_t> next{0};
        std::atomic<int> active{0};  // workers inside
    };

    static void take_pieces(Job& job) {
        for (;;) {
            const int64_t piece = job.next.fetch_add(1, std::memory_order_relaxed);
            if (piece >= job.pieces) return;
            job.call(job.context, job.count * piece / job.pieces, job.count * (piece + 1) / job.pieces);
        }
    }

    void work() {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < 4000 && generation_.load(std::memory_order_acquire) == seen; ++spin) QUIRE_PAUSE();
            Job* job = nullptr;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return stopping_ || generation_.load() != seen; });
                if (stopping_) return;
                seen = generation_.load();
                job = open_;
                if (job) job->active.fetch_add(1, std::memory_order_relaxed);
            }
            if (job) {
                take_pieces(*job);
                job->active.fetch_sub(1, std::memory_order_release);
            }
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
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> generation_{0};
    Job* open_ = nullptr;
    bool stopping_ = false;
};

}  // namespace quire
