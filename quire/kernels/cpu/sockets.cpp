// Collectives of processes on several hosts, over a TCP connection between every two. `group` holds 64-bit words: the address of a
// word that ends waiting, this rank, the number of ranks, the address of a slot for each rank, a slot's bytes, a socket for each rank.
//
// A message is cut into pieces of at most a slot. Of each piece a rank sends its own to all others and receives theirs, in any
// order, so that nobody waits for a buffer that another has to empty first. Sums have the bits of collectives.cpp.
#include "kernels.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#if !defined(MSG_NOSIGNAL)
#define MSG_NOSIGNAL 0  // macOS
#endif

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t MOST_RANKS = 63, GRAIN = 16 << 10;
constexpr int64_t WIDE = 64 << 10;  // elements from which on a sum is a reduce-scatter and an all-gather
constexpr int CHECK_EVERY = 50;  // milliseconds of sleep, after which a wait looks whether it was ended

struct Mesh {
    int64_t* words;

    int64_t rank() const { return words[1]; }
    int64_t size() const { return words[2]; }
    int64_t slot_bytes() const { return words[4]; }
    float* slot(int64_t r) const { return reinterpret_cast<float*>(words[3] + r * words[4]); }
    int socket(int64_t r) const { return (int)words[5 + r]; }
    int64_t* ended() const { return reinterpret_cast<int64_t*>(words[0]); }
    bool is_ended() const { return __atomic_load_n(ended(), __ATOMIC_ACQUIRE) != 0; }
    bool end() const {
        __atomic_store_n(ended(), 1, __ATOMIC_RELEASE);
        return false;
    }
};

// Notes what a socket took or gave; false if the connection is gone.
bool note(int64_t& done, int64_t total, ssize_t moved, bool receives) {
    if (moved > 0) done += moved;
    if (moved == 0 && receives && done < total) return false;
    return moved >= 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

// Sends mine[r] bytes of x[r] to every other rank r and receives theirs[r] bytes of it in its slot. False if waiting was ended,
// which the loss of a connection does too.
bool exchange(const Mesh& mesh, const char* const* x, const int64_t* mine, const int64_t* theirs) {
    int64_t sent[MOST_RANKS] = {}, received[MOST_RANKS] = {};
    while (!mesh.is_ended()) {
        pollfd waiting[MOST_RANKS];
        int count = 0;
        for (int64_t r = 0; r < mesh.size(); ++r) {
            if (r == mesh.rank()) continue;
            const int fd = mesh.socket(r);
            const int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
            if (sent[r] < mine[r] && !note(sent[r], mine[r], send(fd, x[r] + sent[r], mine[r] - sent[r], flags), false))
                return mesh.end();
            char* slot = reinterpret_cast<char*>(mesh.slot(r));
            if (received[r] < theirs[r] &&
                !note(received[r], theirs[r], recv(fd, slot + received[r], theirs[r] - received[r], flags), true))
                return mesh.end();
            const int events = (sent[r] < mine[r] ? POLLOUT : 0) | (received[r] < theirs[r] ? POLLIN : 0);
            if (events) waiting[count++] = pollfd{fd, (short)events, 0};
        }
        if (count == 0) return true;
        poll(waiting, count, CHECK_EVERY);
    }
    return false;
}

// The same `mine` bytes of `x` to every other rank.
bool exchange(const Mesh& mesh, const void* x, int64_t mine, const int64_t* theirs) {
    const char* all[MOST_RANKS];
    int64_t bytes[MOST_RANKS];
    for (int64_t r = 0; r < mesh.size(); ++r) all[r] = static_cast<const char*>(x), bytes[r] = mine;
    return exchange(mesh, all, bytes, theirs);
}

Vec tree(const Mesh& mesh, const float* mine, int64_t first, int64_t count, int64_t at, int n) {
    if (count == 1) return get((first == mesh.rank() ? mine : mesh.slot(first)) + at, n);
    const int64_t half = count / 2;
    return add(tree(mesh, mine, first, half, at, n), tree(mesh, mine, first + half, count - half, at, n));
}

// out [count]: the sum of `mine` and what the slots of the others have.
void add_up(const Mesh& mesh, const float* mine, float* out, int64_t count) {
    parallel((count + LANES - 1) / LANES, GRAIN / LANES, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * LANES; i < end * LANES && i < count; i += LANES) {
            const int n = (int)(count - i < LANES ? count - i : LANES);
            put(out + i, tree(mesh, mine, 0, mesh.size(), i, n), n);
        }
    });
}

// How many of `most` elements there are from `start` on, where there are `total`.
int64_t left(int64_t start, int64_t total, int64_t most) {
    const int64_t count = total - start < most ? total - start : most;
    return count > 0 ? count : 0;
}

// Of the sum of x [total] over the ranks the elements [rank * share, (rank + 1) * share), as far as there are so many. False if
// waiting was ended.
bool scatter_sum(const Mesh& mesh, const float* x, float* out, int64_t total, int64_t share) {
    const int64_t most = mesh.slot_bytes() / (int64_t)sizeof(float);
    for (int64_t start = 0; start < share; start += most) {
        const int64_t mine = mesh.rank() * share + start, count = left(mine, total, left(start, share, most));
        const char* parts[MOST_RANKS];
        int64_t bytes[MOST_RANKS], theirs[MOST_RANKS];
        for (int64_t r = 0; r < mesh.size(); ++r) {
            const int64_t first = r * share + start;
            parts[r] = reinterpret_cast<const char*>(x + first);
            bytes[r] = left(first, total, left(start, share, most)) * (int64_t)sizeof(float);
            theirs[r] = count * (int64_t)sizeof(float);
        }
        if (!exchange(mesh, parts, bytes, theirs)) return false;
        add_up(mesh, x + mine, out + start, count);
    }
    return true;
}

void gather(const Mesh& mesh, const float* x, float* out, int64_t rows, int64_t share, int64_t total) {
    const int64_t most = mesh.slot_bytes() / (int64_t)sizeof(float);
    for (int64_t start = 0; start < rows * share; start += most) {
        int64_t ends[MOST_RANKS], theirs[MOST_RANKS];
        for (int64_t r = 0; r < mesh.size(); ++r) {
            const int64_t wide = total - r * share < share ? total - r * share : share;
            ends[r] = rows * wide < start + most ? rows * wide : start + most;
            theirs[r] = ends[r] > start ? (ends[r] - start) * (int64_t)sizeof(float) : 0;
        }
        if (!exchange(mesh, x + start, theirs[mesh.rank()], theirs)) return;
        for (int64_t r = 0; r < mesh.size(); ++r) {
            const int64_t first = r * share, wide = total - first < share ? total - first : share;
            if (out + first == x) continue;  // it is there
            const float* part = r == mesh.rank() ? x + start : mesh.slot(r);
            for (int64_t i = start; i < ends[r];) {
                const int64_t row = i / wide, column = i % wide;
                const int64_t run = wide - column < ends[r] - i ? wide - column : ends[r] - i;
                std::memcpy(out + row * total + first + column, part + (i - start), run * sizeof(float));
                i += run;
            }
        }
    }
}

}  // namespace

void sum_over_sockets(void* group, const float* x, float* out, int64_t rows, int64_t width) {
    const Mesh mesh{static_cast<int64_t*>(group)};
    const int64_t total = rows * width, most = mesh.slot_bytes() / (int64_t)sizeof(float);
    if (mesh.size() > 2 && total >= WIDE) {  // each rank adds up a share, then gets the others'
        const int64_t share = (total + mesh.size() - 1) / mesh.size();
        float* mine = out + mesh.rank() * share;
        if (scatter_sum(mesh, x, mine, total, share)) gather(mesh, mine, out, 1, share, total);
        return;
    }
    for (int64_t start = 0; start < total; start += most) {
        const int64_t count = left(start, total, most);
        int64_t theirs[MOST_RANKS];
        for (int64_t& bytes : theirs) bytes = count * (int64_t)sizeof(float);
        if (!exchange(mesh, x + start, theirs[0], theirs)) return;
        add_up(mesh, x + start, out + start, count);
    }
}

void scatter_rows_over_sockets(void* group, const float* x, float* out, int64_t rows, int64_t share, int64_t width) {
    const Mesh mesh{static_cast<int64_t*>(group)};
    share = share_of(rows, share, mesh.size());
    const int64_t held = left(mesh.rank() * share, rows, share);
    if (scatter_sum(mesh, x, out, rows * width, share * width))
        std::memset(out + held * width, 0, (share - held) * width * sizeof(float));
}

void gather_rows_over_sockets(void* group, const float* x, float* out, int64_t rows, int64_t share, int64_t width) {
    const Mesh mesh{static_cast<int64_t*>(group)};
    gather(mesh, x, out, 1, share_of(rows, share, mesh.size()) * width, rows * width);
}

void gather_over_sockets(void* group, const float* x, float* out, int64_t rows, int64_t width, int64_t share, int64_t total) {
    gather(Mesh{static_cast<int64_t*>(group)}, x, out, rows, share, total);
}

// Rows are taken until the slot of some rank is full, which counts every row that it sends to anybody. What goes to each rank lies
// by itself, so that a rank gets no row that it does not read.
void rows_over_sockets(void* words, const float* x, const int64_t* routes, float* out, int64_t tokens, int64_t k, int64_t width) {
    const Mesh mesh{static_cast<int64_t*>(words)};
    const int64_t rows = tokens * k, most = mesh.slot_bytes() / (width * (int64_t)sizeof(float)), rank = mesh.rank();
    const int64_t bytes = width * (int64_t)sizeof(float);
    float* sent = (float*)scratch(5, mesh.size() * most * bytes);
    for (int64_t start = 0; start < rows;) {
        int64_t filled[MOST_RANKS] = {}, mine[MOST_RANKS] = {}, theirs[MOST_RANKS] = {}, next[MOST_RANKS] = {}, end = start;
        const char* parts[MOST_RANKS];
        for (int64_t r = 0; r < mesh.size(); ++r) parts[r] = reinterpret_cast<char*>(sent + r * most * width);
        for (; end < rows; ++end) {
            const int64_t source = routes[2 * end], readers = routes[2 * end + 1] & ~(int64_t(1) << source);
            if (!readers) continue;  // stays where it is
            if (filled[source] == most) break;
            ++filled[source];
            if (source != rank) theirs[source] += (readers >> rank & 1) * bytes;
            for (int64_t r = 0; source == rank && r < mesh.size(); ++r) {
                if (!(readers >> r & 1)) continue;
                std::memcpy(sent + (r * most + mine[r] / bytes) * width, x + end * width, bytes);
                mine[r] += bytes;
            }
        }
        if (!exchange(mesh, parts, mine, theirs)) return;
        for (int64_t i = start; i < end; ++i) {
            const int64_t source = routes[2 * i];
            if (!(routes[2 * i + 1] >> rank & 1)) continue;
            std::memcpy(out + i * width, source == rank ? x + i * width : mesh.slot(source) + next[source]++ * width, bytes);
        }
        start = end;
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
