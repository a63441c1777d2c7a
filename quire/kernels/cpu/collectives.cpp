// Collectives of processes on one host, through memory that they share. The memory begins with a header: a word that ends
// all waiting, then a line for each rank. After it come two slots for each rank, used in turn.
//
// A message is cut into pieces of at most a slot. For each piece a rank writes its slot, counts up its sequence number and
// waits for the others'. A slot may be written again two pieces later: whoever published the piece between has read it.
// Whoever waits spins for a moment and then sleeps, so that more ranks than cores do not take the cores from one another.
#include "kernels.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <sched.h>
#include <time.h>

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t LINE = 64, MOST_RANKS = 63, HEADER = LINE * (MOST_RANKS + 1);
constexpr int SPINS = 2000;             // some ten microseconds
constexpr int64_t GRAIN = 16 << 10;     // elements that are worth a thread's attention
constexpr int64_t WIDE = 256 << 10;     // elements from which on a sum is a reduce-scatter and an all-gather
constexpr long CHECK_EVERY = 50000000;  // nanoseconds of sleep, after which a wait looks whether it was ended

struct Line {
    uint32_t sequence, sleepers;
};

struct Group {
    char* memory;
    int64_t rank, size, slot_bytes;

    uint32_t* ended() const { return reinterpret_cast<uint32_t*>(memory); }
    Line* line(int64_t r) const { return reinterpret_cast<Line*>(memory + LINE * (1 + r)); }
    float* slot(int64_t r, uint32_t sequence) const {
        return reinterpret_cast<float*>(memory + HEADER + (2 * r + (sequence & 1)) * slot_bytes);
    }
};

void sleep_on(uint32_t* word, uint32_t seen) {
#if defined(__linux__)
    const timespec limit{0, CHECK_EVERY};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    const timespec moment{0, 50000};
    nanosleep(&moment, nullptr);
#endif
}

void wake(uint32_t* word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

void publish(Line* line, uint32_t sequence) {
    __atomic_store_n(&line->sequence, sequence, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&line->sleepers, __ATOMIC_SEQ_CST)) wake(&line->sequence);
}

// Until a line has come to `sequence`; false if waiting was ended.
bool wait_for(Line* line, uint32_t sequence, const uint32_t* ended) {
    for (int spin = 0;; ++spin) {
        const uint32_t seen = __atomic_load_n(&line->sequence, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - sequence) >= 0) return true;
        if (spin < SPINS) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        if (__atomic_load_n(ended, __ATOMIC_ACQUIRE) != 0) return false;
        __atomic_fetch_add(&line->sleepers, 1, __ATOMIC_SEQ_CST);
        sleep_on(&line->sequence, seen);
        __atomic_fetch_sub(&line->sleepers, 1, __ATOMIC_SEQ_CST);
    }
}

// The next piece: what this rank wrote to its slot is there for all. False if waiting was ended.
bool exchange(const Group& group, uint32_t sequence) {
    publish(group.line(group.rank), sequence);
    for (int64_t r = 0; r < group.size; ++r)
        if (!wait_for(group.line(r), sequence, group.ended())) return false;
    return true;
}

uint32_t next_sequence(const Group& group) { return group.line(group.rank)->sequence + 1; }

// The sum over ranks [first, first + count) at an element of their slots, as a tree that halves the ranks: what a rank sums of its
// own parts in the same way gives the same bits as more ranks with fewer parts. What is ours need not be read from our slot.
Vec tree(const Group& group, uint32_t sequence, const float* mine, int64_t first, int64_t count, int64_t at, int64_t i, int n) {
    if (count == 1) return get(first == group.rank ? mine + i : group.slot(first, sequence) + at + i, n);
    const int64_t half = count / 2;
    return add(tree(group, sequence, mine, first, half, at, i, n),
               tree(group, sequence, mine, first + half, count - half, at, i, n));
}

// out [count]: the sum of what all ranks have published from element `at` of their slots on; `mine` is what we have there.
void add_up(const Group& group, uint32_t sequence, const float* mine, int64_t at, float* out, int64_t count) {
    const float* other = group.size == 2 ? group.slot(1 - group.rank, sequence) + at : nullptr;
    parallel((count + LANES - 1) / LANES, GRAIN / LANES, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * LANES; i < end * LANES && i < count; i += LANES) {
            const int n = (int)(count - i < LANES ? count - i : LANES);
            const Vec sum = other ? add(get(mine + i, n), get(other + i, n)) : tree(group, sequence, mine, 0, group.size, at, i, n);
            put(out + i, sum, n);
        }
    });
}

// How many of `most` elements there are from `start` on, where there are `total`.
int64_t left(int64_t start, int64_t total, int64_t most) {
    const int64_t count = total - start < most ? total - start : most;
    return count > 0 ? count : 0;
}

// Of the sum of x [total] over the ranks the elements [rank * share, (rank + 1) * share), as far as there are so many. A slot has a
// part for each reader. False if waiting was ended.
bool scatter_sum(const Group& group, const float* x, float* out, int64_t total, int64_t share) {
    const int64_t most = group.slot_bytes / (int64_t)sizeof(float) / group.size / LANES * LANES;
    for (int64_t start = 0; start < share; start += most) {
        const uint32_t sequence = next_sequence(group);
        const int64_t wide = left(start, share, most);
        for (int64_t r = 0; r < group.size; ++r) {
            const int64_t first = r * share + start, count = r == group.rank ? 0 : left(first, total, wide);
            if (count) std::memcpy(group.slot(group.rank, sequence) + r * most, x + first, count * sizeof(float));
        }
        if (!exchange(group, sequence)) return false;
        const int64_t first = group.rank * share + start;
        add_up(group, sequence, x + first, group.rank * most, out + start, left(first, total, wide));
    }
    return true;
}

void gather(const Group& group, const float* x, float* out, int64_t rows, int64_t width, int64_t share, int64_t total) {
    const int64_t most = group.slot_bytes / (int64_t)sizeof(float);
    for (int64_t start = 0; start < rows * share; start += most) {
        const uint32_t sequence = next_sequence(group);
        const int64_t mine = left(start, rows * width, most);
        if (mine) std::memcpy(group.slot(group.rank, sequence), x + start, mine * sizeof(float));
        if (!exchange(group, sequence)) return;
        for (int64_t r = 0; r < group.size; ++r) {
            const int64_t first = r * share, wide = total - first < share ? total - first : share;
            if (out + first == x) continue;  // it is there
            const float* theirs = group.slot(r, sequence);
            const int64_t end = rows * wide < start + most ? rows * wide : start + most;
            for (int64_t i = start; i < end;) {
                const int64_t row = i / wide, column = i % wide;
                const int64_t run = wide - column < end - i ? wide - column : end - i;
                std::memcpy(out + row * total + first + column, theirs + (i - start), run * sizeof(float));
                i += run;
            }
        }
    }
}

}  // namespace

void sum_over_ranks(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, const float* x, float* out,
                    int64_t rows, int64_t width) {
    const Group group{static_cast<char*>(memory), rank, size, slot_bytes};
    const int64_t total = rows * width, most = slot_bytes / (int64_t)sizeof(float);
    if (size > 1 && total >= WIDE) {  // each rank adds up a share, then gets the others'
        const int64_t share = (total + size - 1) / size, first = rank * share;
        if (scatter_sum(group, x, out + first, total, share))
            gather(group, out + first, out, 1, left(first, total, share), share, total);
        return;
    }
    for (int64_t start = 0; start < total; start += most) {
        const int64_t count = left(start, total, most);
        const uint32_t sequence = next_sequence(group);
        std::memcpy(group.slot(rank, sequence), x + start, count * sizeof(float));
        if (!exchange(group, sequence)) return;
        add_up(group, sequence, x + start, 0, out + start, count);
    }
}

void scatter_rows_over_ranks(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, const float* x, float* out,
                             int64_t rows, int64_t share, int64_t width) {
    const Group group{static_cast<char*>(memory), rank, size, slot_bytes};
    share = share_of(rows, share, size);
    const int64_t held = left(rank * share, rows, share);
    if (scatter_sum(group, x, out, rows * width, share * width))
        std::memset(out + held * width, 0, (share - held) * width * sizeof(float));
}

void gather_rows_over_ranks(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, const float* x, float* out,
                            int64_t rows, int64_t share, int64_t width) {
    const Group group{static_cast<char*>(memory), rank, size, slot_bytes};
    share = share_of(rows, share, size);
    gather(group, x, out, 1, left(rank * share, rows, share) * width, share * width, rows * width);
}

void gather_over_ranks(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, const float* x, float* out,
                       int64_t rows, int64_t width, int64_t share, int64_t total) {
    gather(Group{static_cast<char*>(memory), rank, size, slot_bytes}, x, out, rows, width, share, total);
}

void own_rows(int64_t rank, int64_t size, const float* x, float* out, int64_t rows, int64_t share, int64_t width) {
    share = share_of(rows, share, size);
    const int64_t first = rank * share, held = left(first, rows, share);
    if (held) std::memcpy(out, x + first * width, held * width * sizeof(float));
    std::memset(out + held * width, 0, (share - held) * width * sizeof(float));
}

// Rows are taken until the slot of some rank is full; all ranks know all routes, so they take the same ones.
void rows_over_ranks(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, const float* x, const int64_t* routes,
                     float* out, int64_t tokens, int64_t k, int64_t width) {
    const Group group{static_cast<char*>(memory), rank, size, slot_bytes};
    const int64_t rows = tokens * k, most = slot_bytes / (width * (int64_t)sizeof(float));
    const size_t bytes = width * sizeof(float);
    for (int64_t start = 0; start < rows;) {
        const uint32_t sequence = next_sequence(group);
        int64_t filled[MOST_RANKS] = {}, end = start;
        for (; end < rows; ++end) {
            const int64_t source = routes[2 * end], readers = routes[2 * end + 1];
            if (!(readers & ~(int64_t(1) << source))) continue;  // stays where it is
            if (filled[source] == most) break;
            if (source == rank) std::memcpy(group.slot(rank, sequence) + filled[rank] * width, x + end * width, bytes);
            ++filled[source];
        }
        if (!exchange(group, sequence)) return;
        int64_t next[MOST_RANKS] = {};
        for (int64_t i = start; i < end; ++i) {
            const int64_t source = routes[2 * i], readers = routes[2 * i + 1];
            const int64_t place = readers & ~(int64_t(1) << source) ? next[source]++ : 0;
            if (!(readers >> rank & 1)) continue;
            std::memcpy(out + i * width, source == rank ? x + i * width : group.slot(source, sequence) + place * width, bytes);
        }
        start = end;
    }
}

// A link from one process to the next: after the word that ends waiting come a line that counts pieces sent and one that
// counts pieces received, then `slots` slots. Whoever is ahead waits: the sender for a free slot, the receiver for a full one.
namespace {

struct Link {
    char* memory;
    int64_t slots, slot_bytes;

    Line* sent() const { return reinterpret_cast<Line*>(memory + LINE); }
    Line* received() const { return reinterpret_cast<Line*>(memory + 2 * LINE); }
    char* slot(uint32_t piece) const { return memory + HEADER + (int64_t)(piece % (uint32_t)slots) * slot_bytes; }
    // Until `line` has counted `count` pieces; false if waiting was ended.
    bool wait_for(Line* line, uint32_t count) const {
        return QUIRE_NS::wait_for(line, count, reinterpret_cast<const uint32_t*>(memory));
    }
};

}  // namespace

void send_to_stage(void* memory, int64_t slots, int64_t slot_bytes, const void* x, int64_t num_bytes) {
    const Link link{static_cast<char*>(memory), slots, slot_bytes};
    for (int64_t start = 0; start < num_bytes; start += slot_bytes) {
        const uint32_t piece = link.sent()->sequence;
        if (!link.wait_for(link.received(), piece + 1 - (uint32_t)slots)) return;
        const int64_t count = num_bytes - start < slot_bytes ? num_bytes - start : slot_bytes;
        std::memcpy(link.slot(piece), static_cast<const char*>(x) + start, count);
        publish(link.sent(), piece + 1);
    }
}

void receive_from_stage(void* memory, int64_t slots, int64_t slot_bytes, void* out, int64_t num_bytes) {
    const Link link{static_cast<char*>(memory), slots, slot_bytes};
    for (int64_t start = 0; start < num_bytes; start += slot_bytes) {
        const uint32_t piece = link.received()->sequence;
        if (!link.wait_for(link.sent(), piece + 1)) return;
        const int64_t count = num_bytes - start < slot_bytes ? num_bytes - start : slot_bytes;
        std::memcpy(static_cast<char*>(out) + start, link.slot(piece), count);
        publish(link.received(), piece + 1);
    }
}

void tokens_in_range(const int64_t* ids, int64_t* out, int64_t count, int64_t first, int64_t size) {
    for (int64_t i = 0; i < count; ++i) out[i] = ids[i] >= first && ids[i] < first + size ? ids[i] - first : 0;
}

void clear_outside_range(const int64_t* ids, float* rows, int64_t count, int64_t width, int64_t first, int64_t size) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < first || ids[i] >= first + size) std::memset(rows + i * width, 0, width * sizeof(float));
}

}  // namespace QUIRE_NS
}  // namespace quire
