// Gated activations of one row.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

enum Activation { SILU, GELU_TANH, CLAMPED_SWIGLU };

// x holds `width` gates and then as many values; out = act(gate) * value, or * (value + 1) where both are clamped
static inline void gate_row(const float* x, float* out, int64_t width, int activation) {
    const Vec one = set(1.0f);
    const float *gate = x, *up = x + width;
    if (activation == CLAMPED_SWIGLU) {
        const Vec most = set(7.0f), least = set(-7.0f), factor = set(-1.702f);
        return map(width, [&](int64_t i, int n) {
            const Vec g = vmin(most, get(gate + i, n));  // the bound first: a NaN in the second place is kept
            const Vec u = vmax(least, vmin(most, get(up + i, n)));
            put(out + i, mul(div(g, add(exp(mul(g, factor)), one)), add(u, one)), n);
        });
    }
    const bool gelu = activation == GELU_TANH;
    const Vec cubic = set(0.044715f), factor = set(gelu ? -1.5957691216f : -1.0f);
    map(width, [&](int64_t i, int n) {
        const Vec g = get(gate + i, n);
        Vec inner = mul(g, factor);
        if (gelu) inner = mul(inner, fma(mul(g, g), cubic, one));
        put(out + i, mul(div(g, add(exp(inner), one)), get(up + i, n)), n);
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
