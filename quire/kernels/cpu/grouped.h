// What grouped matmuls of floats and of integers share: rows sorted by the expert that they go to, and the two stages of
// a sparse MLP around such a matmul. Each row is multiplied as if it were alone, so results never depend on the batch.
#pragma once
#include "gate.h"
#include "plan.h"

namespace quire {
namespace QUIRE_NS {

constexpr int64_t MOST_GROUPED = 1 << 24;  // elements of gathered rows and their results at a time
constexpr int64_t LEAST_TOKENS = 64;       // that are taken at a time nevertheless
constexpr int64_t LEAST_COPIED = 8192;     // elements that are worth another thread

// The rows of one expert: [start, start + count) of the sorted ones. `codes`: where what is made of them begins.
struct Bucket {
    const Plan* plan;
    int64_t start, count, codes;
};

// Rows in the order of their experts, and of one expert in their own order: row i of the sorted ones is order[i], and row r
// comes at place[r]. Rows of experts beyond the last, which other processes hold, are left out: their place is -1.
struct Grouping {
    int64_t rows, num_buckets, *order, *place, *taken;
    Bucket* buckets;

    Grouping(const Plan* const* plans, const int32_t* ids, int64_t rows, int64_t experts) : rows(rows), num_buckets(0) {
        int64_t* memory = (int64_t*)scratch(4, (2 * rows + 2 * experts) * sizeof(int64_t) + experts * sizeof(Bucket));
        order = memory, place = order + rows, taken = place + rows;
        int64_t* next = taken + experts;
        buckets = (Bucket*)(next + experts);
        for (int64_t e = 0; e < experts; ++e) next[e] = 0;
        for (int64_t r = 0; r < rows; ++r)
            if (ids[r] < experts) ++next[ids[r]];
        int64_t start = 0;
        for (int64_t e = 0; e < experts; ++e) {
            const int64_t count = next[e];
            if (count) buckets[num_buckets++] = Bucket{plans[e], start, count, 0};
            next[e] = start;
            start += count;
        }
        for (int64_t r = 0; r < rows; ++r) {
            place[r] = ids[r] < experts ? next[ids[r]]++ : -1;
            if (place[r] >= 0) order[place[r]] = r;
        }
        this->rows = start;
    }
};

// f(bucket, segment, begin, end, column) on all threads for the units of all buckets that `takes` says yes to.
template <class Takes, class F>
static inline void share_buckets(const Grouping& rows, int64_t unit, const Takes& takes, const F& f) {
    int64_t count = 0, taken_rows = 0;
    for (int64_t b = 0; b < rows.num_buckets; ++b)
        if (takes(rows.buckets[b])) {
            rows.taken[count++] = b;
            taken_rows += rows.buckets[b].count;
        }
    if (!count) return;
    const Plan& plan = *rows.buckets[0].plan;  // all have the same sizes
    const int64_t each = units(plan, unit), total = count * each, work = plan.inner * unit * ceil_div(taken_rows, count);
    int64_t grain = least(total / (4 * num_threads()), 32);
    if (grain * work < LEAST_WORK) grain = 1 + LEAST_WORK / work;
    parallel(total, grain, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t index = begin / each, first = index * each, stop = least(end, first + each);
            const Bucket& bucket = rows.buckets[rows.taken[index]];
            split(*bucket.plan, unit, begin - first, stop - first,
                  [&](const Segment& segment, int64_t from, int64_t to, int64_t column) {
                      f(bucket, segment, from, to, column);
                  });
            begin = stop;
        }
    });
}

// multiply(grouping, x sorted, results sorted) for some tokens at a time, then finish(first token, tokens, places, results).
// `shared`: the k rows of a token are one and the same row of x.
template <class Multiply, class Finish>
static inline void run_grouped(const void* plans, const float* x, const int32_t* ids, int64_t tokens, int64_t k,
                               int64_t experts, bool shared, const Multiply& multiply, const Finish& finish) {
    const Plan* const* all = (const Plan* const*)plans;
    const int64_t inner = all[0]->inner, outputs = all[0]->outputs;
    int64_t most = MOST_GROUPED / (k * (inner + outputs));
    most = most < LEAST_TOKENS ? LEAST_TOKENS : most;
    const int64_t parts = ceil_div(tokens, most);
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = tokens * part / parts, count = tokens * (part + 1) / parts - first;
        const Grouping rows(all, ids + first * k, count * k, experts);
        const float* from = x + (shared ? first : first * k) * inner;
        float* sorted = (float*)scratch(5, rows.rows * inner * sizeof(float));
        float* results = (float*)scratch(6, rows.rows * outputs * sizeof(float));
        parallel(rows.rows, 1 + LEAST_COPIED / inner, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = shared ? rows.order[i] / k : rows.order[i];
                copy_in_order(*all[ids[first * k + rows.order[i]]], from + row * inner, sorted + i * inner);
            }
        });
        if (rows.rows) multiply(rows, sorted, results);
        finish(first, count, rows.place, results);
    }
}

// x [tokens, inner] -> out [tokens, k, outputs / 2]
template <class Multiply>
static inline void run_gate_up(const void* plans, const float* x, const int32_t* ids, float* out, int64_t tokens,
                               int64_t k, int64_t experts, int activation, const Multiply& multiply) {
    const int64_t outputs = (*(const Plan* const*)plans)->outputs, width = outputs / 2;
    run_grouped(plans, x, ids, tokens, k, experts, true, multiply,
                [&](int64_t first, int64_t count, const int64_t* place, const float* results) {
                    parallel(count * k, 1 + LEAST_COPIED / outputs, [&](int64_t begin, int64_t end) {
                        for (int64_t r = begin; r < end; ++r)
                            if (place[r] >= 0) gate_row(results + place[r] * outputs, out + (first * k + r) * width, width, activation);
                    });
                });
}

// a [tokens, k, inner] -> out [tokens, outputs]: the weighted results of a token are added from the first to the last. Without
// weights -> out [tokens, k, outputs]: each result by itself; those of other processes' experts are 0
template <class Multiply>
static inline void run_down(const void* plans, const float* a, const int32_t* ids, const float* weights, float* out,
                            int64_t tokens, int64_t k, int64_t experts, const Multiply& multiply) {
    const int64_t width = (*(const Plan* const*)plans)->outputs;
    run_grouped(plans, a, ids, tokens, k, experts, false, multiply,
                [&](int64_t first, int64_t count, const int64_t* place, const float* results) {
                    if (!weights) {
                        parallel(count * k, 1 + LEAST_COPIED / width, [&](int64_t begin, int64_t end) {
                            for (int64_t r = begin; r < end; ++r) {
                                float* slot = out + (first * k + r) * width;
                                if (place[r] >= 0) std::memcpy(slot, results + place[r] * width, width * sizeof(float));
                                else std::memset(slot, 0, width * sizeof(float));
                            }
                        });
                        return;
                    }
                    parallel(count, 1 + LEAST_COPIED / (k * width), [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) {
                            const float* weight = weights + (first + t) * k;
                            const int64_t* mine = place + t * k;
                            int64_t head = 0;
                            while (head < k && mine[head] < 0) ++head;
                            map(width, [&](int64_t i, int n) {
                                Vec total = head < k ? mul(get(results + mine[head] * width + i, n), set(weight[head]))
                                                     : set(0.0f);
                                for (int64_t j = head + 1; j < k; ++j)
                                    if (mine[j] >= 0)
                                        total = add(total, mul(get(results + mine[j] * width + i, n), set(weight[j])));
                                put(out + (first + t) * width + i, total, n);
                            });
                        }
                    });
                });
}

}  // namespace QUIRE_NS
}  // namespace quire
