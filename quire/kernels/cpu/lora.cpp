// What LoRA adapters add to the result of a linear layer.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t GRAIN = 16384;  // multiply-adds that are worth another thread
constexpr int64_t COLUMNS = 4 * LANES;

float dot(const float* x, const float* y, int64_t count) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + COLUMNS <= count; i += COLUMNS)
        for (int j = 0; j < 4; ++j) sums[j] = fma(load(x + i + j * LANES), load(y + i + j * LANES), sums[j]);
    for (; i < count; i += LANES) {
        const int n = (int)(count - i < LANES ? count - i : LANES);
        sums[0] = fma(get(x + i, n), get(y + i, n), sums[0]);
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// out[0, width) += the sum over r of h[r] * up[r * stride + column]
void expand(const float* h, const float* up, int64_t stride, int64_t rank, int64_t width, float* out) {
    map(width, [&](int64_t i, int n) {
        Vec added = zero();
        for (int64_t r = 0; r < rank; ++r) added = fma(set(h[r]), get(up + r * stride + i, n), added);
        put(out + i, add(get(out + i, n), added), n);
    });
}

}  // namespace

void add_lora(const float* x, const float* down, const float* up, const int32_t* slots, const int32_t* ranks,
              const int32_t* widths, float* shrunk, float* out, int64_t tokens, int64_t inner, int64_t pieces,
              int64_t max_rank, int64_t outputs) {
    const int64_t lines = pieces * max_rank;
    parallel(tokens * pieces, 1 + GRAIN / (max_rank * inner), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t t = i / pieces, first = i % pieces * max_rank;
            if (slots[t] < 0) continue;
            const float* matrix = down + (slots[t] * lines + first) * inner;
            for (int64_t r = 0; r < ranks[slots[t]]; ++r)
                shrunk[t * lines + first + r] = dot(x + t * inner, matrix + r * inner, inner);
        }
    });
    parallel(tokens * pieces, 1 + GRAIN * pieces / (max_rank * outputs), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t t = i / pieces, piece = i % pieces;
            if (slots[t] < 0) continue;
            int64_t column = 0;
            for (int64_t p = 0; p < piece; ++p) column += widths[p];
            expand(shrunk + t * lines + piece * max_rank, up + slots[t] * max_rank * outputs + column, outputs,
                   ranks[slots[t]], widths[piece], out + t * outputs + column);
        }
    });
}

// The slot of each token of rows: token t of row rows[i] has starts[i] <= t < starts[i + 1]; past the last, none
void gather_adapters(const int32_t* row_slots, const int64_t* rows, const int32_t* starts, int32_t* out, int64_t count,
                  int64_t tokens) {
    for (int64_t t = starts[count]; t < tokens; ++t) out[t] = -1;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t t = starts[i]; t < starts[i + 1]; ++t) out[t] = row_slots[rows[i]];
}

void select_adapters(const int32_t* slots, const int64_t* tokens, int32_t* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = slots[tokens[i]];
}

}  // namespace QUIRE_NS
}  // namespace quire
