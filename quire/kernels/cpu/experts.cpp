// Which process computes which expert of which token, and what becomes of the results. See ops/routing.py.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

void local_experts(const int32_t* ids, const float* weights, const int32_t* places, int32_t* local, float* kept,
                   int64_t rows, int64_t k, int64_t cycle, int64_t first, int64_t count, int elsewhere) {
    for (int64_t i = 0; i < rows * k; ++i) {
        const int64_t place = places[ids[i] * cycle + i / k % cycle] - first;
        const bool is_here = place >= 0 && place < count;
        local[i] = is_here ? (int32_t)place : elsewhere;
        kept[i] = is_here ? weights[i] : 0.0f;
    }
}

void count_experts(const int32_t* ids, int64_t* counts, int64_t rows, int64_t k) {
    for (int64_t i = 0; i < rows * k; ++i) ++counts[ids[i]];
}

void expert_routes(const int32_t* ids, const int32_t* places, int64_t* tokens_out, int64_t* slots_out, int64_t* sums_out,
                   int64_t rows, int64_t k, int64_t cycle, int64_t share, int64_t size) {
    const int64_t everybody = (int64_t(1) << size) - 1;
    for (int64_t t = 0; t < rows; ++t) {
        const int64_t owner = t % size;
        int64_t readers = 0;
        for (int64_t i = t * k; i < (t + 1) * k; ++i) {
            const int64_t rank = places[ids[i] * cycle + t % cycle] / share;
            readers |= int64_t(1) << rank;
            slots_out[2 * i] = rank;
            slots_out[2 * i + 1] = int64_t(1) << owner;
        }
        tokens_out[2 * t] = sums_out[2 * t] = owner;
        tokens_out[2 * t + 1] = readers;
        sums_out[2 * t + 1] = everybody;
    }
}

void add_slots(const float* slots, const float* weights, float* out, int64_t rows, int64_t k, int64_t width, int64_t rank,
               int64_t size) {
    parallel(rows, 1 + 8192 / (k * width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            if (t % size != rank) continue;
            const float *mine = slots + t * k * width, *weight = weights + t * k;
            map(width, [&](int64_t i, int n) {
                Vec total = mul(get(mine + i, n), set(weight[0]));
                for (int64_t j = 1; j < k; ++j) total = add(total, mul(get(mine + j * width + i, n), set(weight[j])));
                put(out + t * width + i, total, n);
            });
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
