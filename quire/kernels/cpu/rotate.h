// The rotation of one head.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

// The first `rotary` elements, rotated in pairs (i, i + rotary / 2); the others as they are.
static inline void rotate(const float* x, const float* cos, const float* sin, int64_t rotary, int64_t dim, float* out) {
    const int64_t half = rotary / 2;
    map(half, [&](int64_t i, int n) {
        const Vec a = get(x + i, n), b = get(x + half + i, n);
        put(out + i, add(mul(a, get(cos + i, n)), mul(b, get(sin + i, n))), n);
        put(out + half + i, add(mul(b, get(cos + half + i, n)), mul(a, get(sin + half + i, n))), n);
    });
    map(dim - rotary, [&](int64_t i, int n) { put(out + rotary + i, get(x + rotary + i, n), n); });
}

}  // namespace QUIRE_NS
}  // namespace quire
