// The small kernels between matmuls: norms, gated activations, and what picks rows.
#include "gate.h"
#include "norm.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t GRAIN = 8192;  // elements that are worth another thread

// out = f(x), all of [rows, width]
template <class F>
void each_vector(const float* x, float* out, int64_t rows, int64_t width, const F& f) {
    parallel(rows * width, GRAIN, [&](int64_t begin, int64_t end) {
        map(end - begin, [&](int64_t i, int n) { put(out + begin + i, f(get(x + begin + i, n)), n); });
    });
}

}  // namespace

// total = x + residual (if there is one); out = norm(total) * (offset + weight)
void add_rms_norm(const float* x, const float* residual, const float* weight, float* out, float* total,
                        int64_t rows, int64_t width, int64_t x_stride, float eps, float offset) {
    parallel(rows, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float *source = x + r * x_stride, *added = residual + r * width;
            if (!residual) {
                norm_row(source, weight, offset, eps, width, out + r * width);
                continue;
            }
            float* merged = total + r * width;
            const float squares = square_sum(width, [&](int64_t i, int n) {
                const Vec v = add(get(added + i, n), get(source + i, n));
                put(merged + i, v, n);
                return v;
            });
            scale_row(merged, weight, offset, eps, width, squares, out + r * width);
        }
    });
}

void add_layer_norm(const float* x, const float* residual, const float* weight, const float* bias, float* out,
                    float* total, int64_t rows, int64_t width, int64_t x_stride, float eps) {
    parallel(rows, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* source = x + r * x_stride;
            if (residual) {
                float* merged = total + r * width;
                map(width, [&](int64_t i, int n) {
                    put(merged + i, add(get(residual + r * width + i, n), get(source + i, n)), n);
                });
                source = merged;
            }
            layer_norm_row(source, weight, bias, eps, width, out + r * width);
        }
    });
}

// x [rows, 2 * width] holds gate and then up; out = act(gate) * up
void gated(const float* x, float* out, int64_t rows, int64_t width, int activation) {
    parallel(rows, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) gate_row(x + r * 2 * width, out + r * width, width, activation);
    });
}

void gelu(const float* x, float* out, int64_t rows, int64_t width) {
    each_vector(x, out, rows, width, exact_gelu);
}

void scale(const float* x, float* out, int64_t rows, int64_t width, float factor) {
    each_vector(x, out, rows, width, [v = set(factor)](Vec value) { return mul(value, v); });
}

void scale_rows(const float* x, const float* factors, float* out, int64_t rows, int64_t width, int64_t stride,
                int64_t count) {
    parallel(rows, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float *source = x + r * width, factor = factors[r * stride];
            float* target = out + r * width;
            map(count, [&](int64_t i, int n) { put(target + i, mul(get(source + i, n), set(factor)), n); });
            std::memcpy(target + count, source + count, sizeof(float) * (width - count));
        }
    });
}

// tanh through exp: cap - 2 cap / (e^(2 x / cap) + 1)
void soft_cap(const float* x, float* out, int64_t rows, int64_t width, float cap) {
    const Vec most = set(cap), twice = set(2 * cap), factor = set(2 / cap), one = set(1.0f);
    each_vector(x, out, rows, width,
                [&](Vec value) { return sub(most, div(twice, add(exp(mul(value, factor)), one))); });
}

void gather_rows(const float* x, const int64_t* rows, float* out, int64_t count, int64_t width) {
    parallel(count, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) std::memcpy(out + r * width, x + rows[r] * width, sizeof(float) * width);
    });
}

void join_columns(const float* first, const float* second, float* out, int64_t rows, int64_t first_width,
                  int64_t second_width) {
    const int64_t width = first_width + second_width;
    parallel(rows, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            std::memcpy(out + r * width, first + r * first_width, sizeof(float) * first_width);
            std::memcpy(out + r * width + first_width, second + r * second_width, sizeof(float) * second_width);
        }
    });
}

void spread_logits(const float* logits, const int64_t* offsets, float* out, int64_t rows, int64_t width,
                   int64_t out_width) {
    parallel(rows, 1 + GRAIN / out_width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* mine = out + r * out_width;
            for (int64_t i = 0; i < out_width; ++i) mine[i] = -__builtin_inff();
            for (int64_t i = 0; i < width; ++i) mine[i + offsets[i]] = logits[r * width + i];
        }
    });
}

void note_finite(const float* x, int64_t rows, int64_t width, int64_t stride, uint8_t* out) {
    parallel(rows, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            Vec broken = zero();
            map(width, [&](int64_t i, int n) { broken = fma(get(x + r * stride + i, n), zero(), broken); });
            out[r] = sum(broken) == 0.0f;  // NaN if a value is NaN or infinite
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
