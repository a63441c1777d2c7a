// Gated activations of one row.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

enum Activation { SILU, GELU_TANH, CLAMPED_SWIGLU, GELU };

// x * Phi(x) as max(x, 0) - |x| * Phi(-|x|); erf by Abramowitz and Stegun 7.1.26
static inline Vec exact_gelu(Vec value) {
    const Vec one = set(1.0f), half = set(0.5f);
    const Vec size = vmax(value, sub(zero(), value)), distance = mul(size, set(0.70710678f));
    const Vec t = div(one, fma(distance, set(0.3275911f), one));
    Vec tail = fma(set(1.061405429f), t, set(-1.453152027f));
    tail = fma(tail, t, set(1.421413741f));
    tail = fma(tail, t, set(-0.284496736f));
    tail = mul(fma(tail, t, set(0.254829592f)), t);
    tail = mul(mul(tail, half), exp(sub(zero(), mul(distance, distance))));
    return sub(vmax(value, zero()), mul(size, tail));
}

// out = act(gate) * up, or * (up + 1) where both are clamped
static inline void gate_parts(const float* gate, const float* up, float* out, int64_t width, int activation) {
    const Vec one = set(1.0f);
    if (activation == CLAMPED_SWIGLU) {
        const Vec most = set(7.0f), least = set(-7.0f), factor = set(-1.702f);
        return map(width, [&](int64_t i, int n) {
            const Vec g = vmin(most, get(gate + i, n));  // the bound first: a NaN in the second place is kept
            const Vec u = vmax(least, vmin(most, get(up + i, n)));
            put(out + i, mul(div(g, add(exp(mul(g, factor)), one)), add(u, one)), n);
        });
    }
    if (activation == GELU)
        return map(width, [&](int64_t i, int n) {
            put(out + i, mul(exact_gelu(get(gate + i, n)), get(up + i, n)), n);
        });
    const bool gelu = activation == GELU_TANH;
    const Vec cubic = set(0.044715f), factor = set(gelu ? -1.5957691216f : -1.0f);
    map(width, [&](int64_t i, int n) {
        const Vec g = get(gate + i, n);
        Vec inner = mul(g, factor);
        if (gelu) inner = mul(inner, fma(mul(g, g), cubic, one));
        put(out + i, mul(div(g, add(exp(inner), one)), get(up + i, n)), n);
    });
}

// x holds `width` gates and then as many values.
static inline void gate_row(const float* x, float* out, int64_t width, int activation) {
    gate_parts(x, x + width, out, width, activation);
}

}  // namespace QUIRE_NS
}  // namespace quire
