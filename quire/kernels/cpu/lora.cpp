// What LoRA adapters add to the result of a linear layer.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t GRAIN = 16384;  // multiply-adds that are worth another thread
constexpr int64_t BLOCK = 64;     // tokens among which those of one adapter are looked for
constexpr int64_t COLUMNS = 8 * LANES;
constexpr int TILE = 4;   // tokens of one adapter that read its matrices together
constexpr int LINES = 4;  // of `down` that read these tokens together

// Calls work(tokens, count, slot) so that each token of [begin, end) that has an adapter is in one tile. A token's
// result does not depend on its tile: each sum is a chain of its own, always in the same order.
template <class Work>
void tiles(const int32_t* slots, int64_t begin, int64_t end, Work work) {
    bool done[BLOCK] = {};
    for (int64_t first = begin; first < end; ++first) {
        if (slots[first] < 0 || done[first - begin]) continue;
        int64_t found[TILE];
        int count = 0;
        for (int64_t t = first; t < end && count < TILE; ++t) {
            if (slots[t] != slots[first] || done[t - begin]) continue;
            done[t - begin] = true;
            found[count++] = t;
        }
        work(found, count, slots[first]);
    }
}

// out[t][r] = the dot product of x[t] and line r of a matrix
template <int T, int R>
void shrink(const float* const* x, const float* matrix, int64_t inner, float* const* out) {
    Vec sums[T][R];
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) sums[t][r] = zero();
    int64_t i = 0;
    for (; i + LANES <= inner; i += LANES) {
        Vec lines[R];
        for (int r = 0; r < R; ++r) lines[r] = load(matrix + r * inner + i);
        for (int t = 0; t < T; ++t) {
            const Vec values = load(x[t] + i);
            for (int r = 0; r < R; ++r) sums[t][r] = fma(values, lines[r], sums[t][r]);
        }
    }
    if (i < inner) {
        const int n = (int)(inner - i);
        for (int t = 0; t < T; ++t)
            for (int r = 0; r < R; ++r)
                sums[t][r] = fma(get(x[t] + i, n), get(matrix + r * inner + i, n), sums[t][r]);
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) out[t][r] = sum(sums[t][r]);
}

template <int T>
void shrink_lines(const float* const* x, const float* matrix, int64_t inner, int64_t lines, float* const* out) {
    constexpr int R = T < TILE || LANES >= 16 ? LINES : LINES / 2;  // as many sums as there are registers for
    float* at[T];
    for (int64_t r = 0; r < lines;) {
        for (int t = 0; t < T; ++t) at[t] = out[t] + r;
        if (r + R <= lines) {
            shrink<T, R>(x, matrix + r * inner, inner, at);
            r += R;
        } else {
            shrink<T, 1>(x, matrix + r * inner, inner, at);
            r += 1;
        }
    }
}

// out[t][0, width) += the sum over r of h[t][r] * up[r * stride + column]
template <int T>
void expand(const float* const* h, const float* up, int64_t stride, int64_t rank, int64_t width, float* const* out) {
    map(width, [&](int64_t i, int n) {
        Vec added[T];
        for (int t = 0; t < T; ++t) added[t] = zero();
        for (int64_t r = 0; r < rank; ++r) {
            const Vec line = get(up + r * stride + i, n);
            for (int t = 0; t < T; ++t) added[t] = fma(set(h[t][r]), line, added[t]);
        }
        for (int t = 0; t < T; ++t) put(out[t] + i, add(get(out[t] + i, n), added[t]), n);
    });
}

}  // namespace

void add_lora(const float* x, const float* down, const float* up, const int32_t* slots, const int32_t* ranks,
              const int32_t* widths, float* shrunk, float* out, int64_t tokens, int64_t inner, int64_t pieces,
              int64_t max_rank, int64_t outputs) {
    const int64_t lines = pieces * max_rank, blocks = (tokens + BLOCK - 1) / BLOCK;
    const int64_t groups = (max_rank + LINES - 1) / LINES;
    const int64_t per_block = tokens < BLOCK ? tokens : BLOCK;
    parallel(blocks * pieces * groups, 1 + GRAIN / (LINES * inner * per_block), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t block = i / (pieces * groups), first = i % groups * LINES;
            const int64_t piece = i / groups % pieces, last = (block + 1) * BLOCK;
            tiles(slots, block * BLOCK, last < tokens ? last : tokens, [&](const int64_t* found, int count, int32_t slot) {
                const int64_t left = ranks[slot] - first, wanted = left < LINES ? left : LINES;
                if (wanted <= 0) return;
                const float* matrix = down + (slot * lines + piece * max_rank + first) * inner;
                const float* in[TILE];
                float* to[TILE];
                for (int t = 0; t < count; ++t) {
                    in[t] = x + found[t] * inner;
                    to[t] = shrunk + found[t] * lines + piece * max_rank + first;
                }
                if (count == 4) shrink_lines<4>(in, matrix, inner, wanted, to);
                else if (count == 3) shrink_lines<3>(in, matrix, inner, wanted, to);
                else if (count == 2) shrink_lines<2>(in, matrix, inner, wanted, to);
                else shrink_lines<1>(in, matrix, inner, wanted, to);
            });
        }
    });
    int64_t parts = 0;
    for (int64_t p = 0; p < pieces; ++p) parts += (widths[p] + COLUMNS - 1) / COLUMNS;
    parallel(blocks * parts, 1 + GRAIN / (max_rank * COLUMNS * per_block), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t block = i / parts, last = (block + 1) * BLOCK;
            int64_t piece = 0, start = 0, part = i % parts;
            for (; part >= (widths[piece] + COLUMNS - 1) / COLUMNS; ++piece) {
                part -= (widths[piece] + COLUMNS - 1) / COLUMNS;
                start += widths[piece];
            }
            const int64_t inside = part * COLUMNS, rest = widths[piece] - inside;
            const int64_t column = start + inside, width = rest < COLUMNS ? rest : COLUMNS;
            tiles(slots, block * BLOCK, last < tokens ? last : tokens, [&](const int64_t* found, int count, int32_t slot) {
                const float* matrix = up + slot * max_rank * outputs + column;
                const float* h[TILE];
                float* to[TILE];
                for (int t = 0; t < count; ++t) {
                    h[t] = shrunk + found[t] * lines + piece * max_rank;
                    to[t] = out + found[t] * outputs + column;
                }
                if (count == 4) expand<4>(h, matrix, outputs, ranks[slot], width, to);
                else if (count == 3) expand<3>(h, matrix, outputs, ranks[slot], width, to);
                else if (count == 2) expand<2>(h, matrix, outputs, ranks[slot], width, to);
                else expand<1>(h, matrix, outputs, ranks[slot], width, to);
            });
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
