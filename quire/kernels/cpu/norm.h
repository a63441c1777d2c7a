// The RMS norm of one row.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

static inline float square_sum(const float* x, int64_t width) {
    Sum16 sums;
    int part = 0;
    map(width, [&](int64_t i, int n) {
        const Vec v = get(x + i, n);
        sums.part[part] = fma(v, v, sums.part[part]);
        part = (part + 1) % Sum16::PARTS;
    });
    return sums.total();
}

static inline void norm_row(const float* x, const float* weight, float offset, float eps, int64_t width, float* out) {
    const Vec scale = set(1.0f / std::sqrt(square_sum(x, width) / (float)width + eps)), shift = set(offset);
    map(width, [&](int64_t i, int n) { put(out + i, mul(mul(get(x + i, n), scale), add(get(weight + i, n), shift)), n); });
}

}  // namespace QUIRE_NS
}  // namespace quire
