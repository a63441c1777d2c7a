// The greedy choice: the first highest score. Exact, so in any order of work the same.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t CHUNK = 8192;  // tokens of a row that one thread takes at a time

struct Best {
    float score;
    int64_t index;
};

// The better of two, of which `later` has higher indices. NaN wins, so that it is not hidden.
inline Best better(Best first, Best later) {
    if (first.score != first.score) return first;
    return later.score > first.score || later.score != later.score ? later : first;
}

// The first of the highest of `count` scores.
Best find_best(const float* scores, int64_t count) {
    Vec most = set(-INFINITY), broken = zero();
    map(count, [&](int64_t i, int n) {
        float lanes[LANES];
        if (n < LANES)
            for (int k = 0; k < LANES; ++k) lanes[k] = scores[i + (k < n ? k : 0)];
        const Vec v = load(n < LANES ? lanes : scores + i);
        broken = add(broken, mul(v, zero()));  // NaN if v is, but also if it is infinite
        most = vmax(v, most);
    });
    const float highest = max_lane(most);
    const float sign = sum(broken);
    if (sign != sign)
        for (int64_t i = 0; i < count; ++i)
            if (scores[i] != scores[i]) return {scores[i], i};
    int64_t i = 0;
    const Vec wanted = set(highest);
    while (i + LANES <= count && !any_equal(load(scores + i), wanted)) i += LANES;
    while (i < count && scores[i] != highest) ++i;
    return {highest, i};
}

}  // namespace

void first_max(const float* scores, int64_t rows, int64_t size, int64_t stride, int64_t* ids, float* best) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
    Best* found = (Best*)scratch(0, sizeof(Best) * rows * chunks);
    parallel(rows * chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % chunks * CHUNK, count = size - first < CHUNK ? size - first : CHUNK;
            found[i] = find_best(scores + i / chunks * stride + first, count);
            found[i].index += first;
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        Best highest = found[r * chunks];
        for (int64_t c = 1; c < chunks; ++c) highest = better(highest, found[r * chunks + c]);
        ids[r] = highest.index;
        best[r] = highest.score;
    }
}

void greedy(const float* logits, int64_t rows, int64_t size, int64_t stride, int32_t* tokens, float* highest) {
    int64_t* ids = (int64_t*)scratch(4, sizeof(int64_t) * rows);
    first_max(logits, rows, size, stride, ids, highest);
    for (int64_t r = 0; r < rows; ++r) {
        tokens[r] = (int32_t)ids[r];
        if (highest[r] != highest[r]) highest[r] = INFINITY;
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
