// Matmuls in float32. Every output element is summed in one fixed order, whatever the number of rows and
// wherever a row stands in them, so results never depend on the batch.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

// An output is the dot product of a row of x and a row of the weight: LANES partial sums over k, k + LANES, ..., added
// by `sum`. Tiles of ROWS x OUTS share loads; they do not change the order of any sum.
template <int ROWS, int OUTS>
inline void tile(const float* x, int64_t x_stride, const float* w, int64_t inner, const float* bias, float* out,
                 int64_t out_stride) {
    Vec acc[ROWS][OUTS];
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUTS; ++o) acc[r][o] = zero();
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES) {
        Vec xs[ROWS];
        for (int r = 0; r < ROWS; ++r) xs[r] = load(x + r * x_stride + k);
        for (int o = 0; o < OUTS; ++o) {
            const Vec weight = load(w + o * inner + k);
            for (int r = 0; r < ROWS; ++r) acc[r][o] = fma(xs[r], weight, acc[r][o]);
        }
    }
    if (k < inner) {
        const int rest = (int)(inner - k);
        for (int o = 0; o < OUTS; ++o) {
            const Vec weight = load_part(w + o * inner + k, rest);
            for (int r = 0; r < ROWS; ++r) acc[r][o] = fma(load_part(x + r * x_stride + k, rest), weight, acc[r][o]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUTS; ++o) out[r * out_stride + o] = sum(acc[r][o]) + (bias ? bias[o] : 0.0f);
}

template <int OUTS>
inline void tile_rows(const float* x, int64_t rows, const float* w, int64_t inner, const float* bias, float* out,
                      int64_t n) {
    int64_t r = 0;
    for (; r + ROW_TILE <= rows; r += ROW_TILE)
        tile<ROW_TILE, OUTS>(x + r * inner, inner, w, inner, bias, out + r * n, n);
    for (; r + 2 <= rows; r += 2) tile<2, OUTS>(x + r * inner, inner, w, inner, bias, out + r * n, n);
    if (r < rows) tile<1, OUTS>(x + r * inner, inner, w, inner, bias, out + r * n, n);
}

void outputs(const float* x, int64_t rows, const float* w, int64_t inner, const float* bias, float* out, int64_t n,
             int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + OUT_TILE <= end; o += OUT_TILE)
        tile_rows<OUT_TILE>(x, rows, w + o * inner, inner, bias ? bias + o : nullptr, out + o, n);
    for (; o < end; ++o) tile_rows<1>(x, rows, w + o * inner, inner, bias ? bias + o : nullptr, out + o, n);
}

}  // namespace

void linear(const float* x, const float* w, const float* bias, float* out, int64_t rows, int64_t n, int64_t inner) {
    // Rows in chunks whose x stays in the second-level cache while all weights pass by.
    int64_t chunk = (384 << 10) / (inner * (int64_t)sizeof(float)) / ROW_TILE * ROW_TILE;
    chunk = chunk < 8 * ROW_TILE ? 8 * ROW_TILE : chunk;
    const int64_t grain = OUT_TILE * (1 + (1 << 16) / (inner * OUT_TILE * (rows < 16 ? rows : 16)));
    parallel(n, grain, [&](int64_t begin, int64_t end) {
        for (int64_t r = 0; r < rows; r += chunk) {
            const int64_t count = rows - r < chunk ? rows - r : chunk;
            outputs(x + r * inner, count, w, inner, bias, out + r * n, n, begin, end);
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
