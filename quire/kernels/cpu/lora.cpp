// What LoRA adapters add to the result of a linear layer.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t GRAIN = 16384;  // multiply-adds that are worth another thread
constexpr int64_t WIDTH = 17;     // of a line of tiles: a slot and its tokens
constexpr int64_t COLUMNS = 8 * LANES;
constexpr int TILE = 4;   // tokens that read an adapter's matrices together
constexpr int LINES = 4;  // of `down` that read these tokens together

int64_t count_tiles(const int32_t* tiles, int64_t tokens) {
    int64_t count = 0;
    while (count < tokens && tiles[count * WIDTH] >= 0) ++count;
    return count;
}

// Calls work(tokens, count) for up to TILE tokens of a tile at a time. A token's result does not depend on who is beside
// it: each sum is a chain of its own, always in the same order.
template <class Work>
void each_tokens(const int32_t* tile, Work work) {
    for (int64_t first = 1; first < WIDTH && tile[first] >= 0; first += TILE) {
        int count = 1;
        while (count < TILE && first + count < WIDTH && tile[first + count] >= 0) ++count;
        work(tile + first, count);
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

// out[t][i, i + C * LANES) += the sum over r of h[t][r] * up[r * stride + i]; n: lanes of the last vector
template <int T, int C>
void expand_columns(const float* const* h, const float* up, int64_t stride, int64_t rank, int64_t i, int n,
                    float* const* out) {
    Vec added[T][C];
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < C; ++c) added[t][c] = zero();
    for (int64_t r = 0; r < rank; ++r) {
        Vec line[C];
        for (int c = 0; c < C; ++c) line[c] = get(up + r * stride + i + c * LANES, c + 1 < C ? LANES : n);
        for (int t = 0; t < T; ++t) {
            const Vec value = set(h[t][r]);
            for (int c = 0; c < C; ++c) added[t][c] = fma(value, line[c], added[t][c]);
        }
    }
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < C; ++c) {
            float* at = out[t] + i + c * LANES;
            const int lanes = c + 1 < C ? LANES : n;
            put(at, add(get(at, lanes), added[t][c]), lanes);
        }
}

template <int T>
void expand(const float* const* h, const float* up, int64_t stride, int64_t rank, int64_t width, float* const* out) {
    constexpr int C = LANES >= 16 ? 4 : 2;  // vectors whose sums stay in registers
    int64_t i = 0;
    for (; i + C * LANES <= width; i += C * LANES) expand_columns<T, C>(h, up, stride, rank, i, LANES, out);
    for (; i < width; i += LANES)
        expand_columns<T, 1>(h, up, stride, rank, i, width - i < LANES ? (int)(width - i) : LANES, out);
}

}  // namespace

void shrink_lora(const float* x, const float* down, const int32_t* tiles, const int32_t* ranks, float* shrunk,
                 int64_t tokens, int64_t inner, int64_t pieces, int64_t max_rank) {
    const int64_t lines = pieces * max_rank, groups = (max_rank + LINES - 1) / LINES, count = count_tiles(tiles, tokens);
    const int64_t per_tile = tokens < WIDTH - 1 ? tokens : WIDTH - 1;
    parallel(count * pieces * groups, 1 + GRAIN / (LINES * inner * per_tile), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int32_t* tile = tiles + i / (pieces * groups) * WIDTH;
            const int64_t slot = tile[0], first = i % groups * LINES, piece = i / groups % pieces;
            const int64_t left = ranks[slot] - first, wanted = left < LINES ? left : LINES;
            if (wanted <= 0) continue;
            const float* matrix = down + (slot * lines + piece * max_rank + first) * inner;
            each_tokens(tile, [&](const int32_t* found, int count) {
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
}

void expand_lora(const float* shrunk, const float* up, const int32_t* tiles, const int32_t* ranks, const int32_t* widths,
                 float* out, int64_t tokens, int64_t pieces, int64_t max_rank, int64_t outputs) {
    const int64_t lines = pieces * max_rank, count = count_tiles(tiles, tokens);
    const int64_t per_tile = tokens < WIDTH - 1 ? tokens : WIDTH - 1;
    int64_t parts = 0;
    for (int64_t p = 0; p < pieces; ++p) parts += (widths[p] + COLUMNS - 1) / COLUMNS;
    parallel(count * parts, 1 + GRAIN / (max_rank * COLUMNS * per_tile), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int32_t* tile = tiles + i / parts * WIDTH;
            const int64_t slot = tile[0], rank = ranks[slot];
            int64_t piece = 0, start = 0, part = i % parts;
            for (; part >= (widths[piece] + COLUMNS - 1) / COLUMNS; ++piece) {
                part -= (widths[piece] + COLUMNS - 1) / COLUMNS;
                start += widths[piece];
            }
            const int64_t inside = part * COLUMNS, rest = widths[piece] - inside;
            const int64_t column = start + inside, width = rest < COLUMNS ? rest : COLUMNS;
            const float* matrix = up + slot * max_rank * outputs + column;
            if (rank == 0) continue;
            each_tokens(tile, [&](const int32_t* found, int count) {
                const float* h[TILE];
                float* to[TILE];
                for (int t = 0; t < count; ++t) {
                    h[t] = shrunk + found[t] * lines + piece * max_rank;
                    to[t] = out + found[t] * outputs + column;
                }
                if (count == 4) expand<4>(h, matrix, outputs, rank, width, to);
                else if (count == 3) expand<3>(h, matrix, outputs, rank, width, to);
                else if (count == 2) expand<2>(h, matrix, outputs, rank, width, to);
                else expand<1>(h, matrix, outputs, rank, width, to);
            });
        }
    });
}

// Tokens by slot, those without one last: lines of a slot and up to WIDTH - 1 of its tokens, -1 for what there is not
void tile_adapters(const int32_t* slots, int32_t* tiles, int64_t tokens, int64_t num_slots) {
    for (int64_t i = 0; i < tokens * WIDTH; ++i) tiles[i] = -1;
    int32_t* line = tiles;
    for (int64_t i = 0; i <= num_slots; ++i) {
        const int64_t slot = i < num_slots ? i : -1;
        int64_t count = 0;
        for (int64_t t = 0; t < tokens; ++t) {
            if (slots[t] != slot) continue;
            if (count == WIDTH - 1) count = 0, line += WIDTH;
            line[0] = (int32_t)slot;
            line[1 + count++] = (int32_t)t;
        }
        if (count) line += WIDTH;
    }
}

// The slot of each token of rows: token t of row rows[i] has starts[i] <= t < starts[i + 1]; past the last, none
void gather_adapters(const int32_t* row_slots, const int64_t* rows, const int32_t* starts, int32_t* out, int64_t count,
                  int64_t tokens) {
    for (int64_t t = starts[count]; t < tokens; ++t) out[t] = -1;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t t = starts[i]; t < starts[i + 1]; ++t) out[t] = row_slots[rows[i]];
}

// shrunk[t] = the column of token ids[t] in the matrix [max_rank, tokens] of its slot
void look_up_lora(const int64_t* ids, const float* down, const int32_t* slots, float* shrunk, int64_t count,
                  int64_t max_rank, int64_t tokens) {
    for (int64_t t = 0; t < count; ++t) {
        if (slots[t] < 0) continue;
        const float* column = down + slots[t] * max_rank * tokens + ids[t];
        for (int64_t r = 0; r < max_rank; ++r) shrunk[t * max_rank + r] = column[r * tokens];
    }
}

void pick_adapters(const int32_t* slots, int32_t* out, int64_t tokens, int64_t first, int64_t count) {
    for (int64_t t = 0; t < tokens; ++t)
        out[t] = slots[t] >= first && slots[t] < first + count ? (int32_t)(slots[t] - first) : -1;
}

void select_adapters(const int32_t* slots, const int64_t* tokens, int32_t* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = slots[tokens[i]];
}

}  // namespace QUIRE_NS
}  // namespace quire
