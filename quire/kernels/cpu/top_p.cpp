// top_p over a vocabulary: a radix select of the last token that is kept. See ops/top_p.py, which it equals bit for bit.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

// A float's place in the order, the highest first; equal floats, also 0 and -0, have the same.
static inline uint32_t rank_of(float value) {
    const float positive_zero = value + 0.0f;
    int32_t bits;
    std::memcpy(&bits, &positive_zero, sizeof bits);
    return 0x7FFFFFFFu - (uint32_t)(bits ^ ((bits >> 31) & 0x7FFFFFFF));
}

// A probability in multiples of 2^-40; that of a token which cannot be drawn counts nothing.
static inline int64_t weight_of(float probability, float logit) {
    const bool counts = logit != -INFINITY && probability >= 0.0f && probability <= 2.0f;  // not NaN
    return counts ? (int64_t)(probability * 1099511627776.0f) : 0;
}

// The first of `count` masses at which their sum reaches `needed`, which becomes what that one must give.
static inline int64_t reach(const int64_t* masses, int64_t count, int64_t& needed) {
    int64_t at = 0;
    for (; at + 1 < count && masses[at] < needed; ++at) needed -= masses[at];
    return at;
}

static void keep_row(const float* logits, const float* probabilities, double top_p, int64_t size, float* out) {
    constexpr int SHIFTS[] = {21, 10, 0}, BITS[] = {11, 11, 10};
    int64_t needed = 0;
    uint32_t last = 0;
    for (int pass = 0; pass < 3; ++pass) {
        int64_t masses[2048] = {}, total = 0;
        const uint32_t mask = (1u << BITS[pass]) - 1;
        const int above = SHIFTS[pass] + BITS[pass];
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t rank = rank_of(logits[i]);
            if (pass && rank >> above != last >> above) continue;
            const int64_t weight = weight_of(probabilities[i], logits[i]);
            masses[rank >> SHIFTS[pass] & mask] += weight;
            total += weight;
        }
        if (pass == 0) {
            needed = (int64_t)__builtin_ceil((double)total * top_p);
            if (needed < 1) needed = 1;
        }
        last |= (uint32_t)reach(masses, mask + 1, needed) << SHIFTS[pass];
    }
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t rank = rank_of(logits[i]);
        bool kept = rank < last;
        if (rank == last) {
            kept = needed > 0;
            needed -= weight_of(probabilities[i], logits[i]);
        }
        out[i] = kept ? logits[i] : -INFINITY;
    }
}

void keep_top_p(const float* logits, const float* probabilities, const double* top_p, int64_t rows, int64_t size,
                float* out) {
    parallel(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            keep_row(logits + r * size, probabilities + r * size, top_p[r], size, out + r * size);
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
