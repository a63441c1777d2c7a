// The RMS norm of one row.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

// The sum of squares of read(index, count), which is called once for each vector of the row, in order.
template <class Read>
static inline float square_sum(int64_t width, const Read& read) {
    Sum16 sums;
    int part = 0;
    map(width, [&](int64_t i, int n) {
        const Vec v = read(i, n);
        sums.part[part] = fma(v, v, sums.part[part]);
        part = (part + 1) % Sum16::PARTS;
    });
    return sums.total();
}

// out = x * (offset + weight) / root of the mean square
static inline void scale_row(const float* x, const float* weight, float offset, float eps, int64_t width, float squares,
                             float* out) {
    const Vec scale = set(1.0f / std::sqrt(squares / (float)width + eps)), shift = set(offset);
    map(width, [&](int64_t i, int n) { put(out + i, mul(mul(get(x + i, n), scale), add(get(weight + i, n), shift)), n); });
}

// out = (x - mean) / deviation * weight + bias
static inline void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, int64_t width,
                                  float* out) {
    Sum16 sums;
    int part = 0;
    map(width, [&](int64_t i, int n) {
        sums.part[part] = add(get(x + i, n), sums.part[part]);
        part = (part + 1) % Sum16::PARTS;
    });
    const Vec mean = set(sums.total() / (float)width);
    map(width, [&](int64_t i, int n) { put(out + i, sub(get(x + i, n), mean), n); });
    const float squares = square_sum(width, [&](int64_t i, int n) { return get(out + i, n); });
    const Vec scale = set(1.0f / std::sqrt(squares / (float)width + eps));
    map(width, [&](int64_t i, int n) {
        put(out + i, add(mul(mul(get(out + i, n), scale), get(weight + i, n)), get(bias + i, n)), n);
    });
}

static inline void norm_row(const float* x, const float* weight, float offset, float eps, int64_t width, float* out) {
    const float squares = square_sum(width, [&](int64_t i, int n) { return get(x + i, n); });
    scale_row(x, weight, offset, eps, width, squares, out);
}

}  // namespace QUIRE_NS
}  // namespace quire
