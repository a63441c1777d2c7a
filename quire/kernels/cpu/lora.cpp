// What LoRA adapters add to the result of a linear layer.
#include "gate.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t GRAIN = 16384;  // multiply-adds that are worth another thread
constexpr int64_t WIDTH = 17;     // of a line of tiles: a slot and its tokens
constexpr int64_t COLUMNS = 8 * LANES;
constexpr int TILE = 4;   // tokens that read an adapter's matrices together
constexpr int LINES = 4;  // of `down` that read these tokens together

template <int N>
struct Count {
    static constexpr int value = N;
};

// Adapters are float32, or float16 as uint16_t.
inline Vec load_any(const float* p) { return load(p); }
inline Vec load_any(const uint16_t* p) { return load_half(p); }
inline Vec get_any(const float* p, int n) { return get(p, n); }
inline Vec get_any(const uint16_t* p, int n) {
    if (n == LANES) return load_half(p);
    uint16_t part[LANES] = {};
    std::memcpy(part, p, n * sizeof(uint16_t));
    return load_half(part);
}

// What a vector of `p` shares a cache line with, fetched once for the line.
template <class E>
inline void prefetch(const E* p, int64_t i) {
    if (i * (int64_t)sizeof(E) % 64 == 0) fetch(p + i);
}

int64_t count_tiles(const int32_t* tiles, int64_t tokens, int32_t lowest) {
    int64_t count = 0;
    while (count < tokens && tiles[count * WIDTH] >= lowest && tiles[count * WIDTH + 1] >= 0) ++count;
    return count;
}

// f(index) in order for runs of [0, count), each long enough for what is fetched ahead to be its own.
template <class F>
void share(int64_t count, int64_t work, const F& f) {
    const int64_t least = 1 + GRAIN / work, run = count / (4 * num_threads());
    parallel(count, run > least ? run : least, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) f(i);
    });
}

int64_t most_in_tile(int64_t tokens) { return tokens < WIDTH - 1 ? tokens : WIDTH - 1; }

// Calls work(tokens, count) for up to TILE tokens of a tile at a time, `count` being a constant. A token's result does not
// depend on who is beside it: each sum is a chain of its own, always in the same order.
template <class Work>
void each_tokens(const int32_t* tile, const Work& work) {
    for (int64_t first = 1; first < WIDTH && tile[first] >= 0; first += TILE) {
        const int32_t* found = tile + first;
        int count = 1;
        while (count < TILE && first + count < WIDTH && found[count] >= 0) ++count;
        if (count == 4) work(found, Count<4>());
        else if (count == 3) work(found, Count<3>());
        else if (count == 2) work(found, Count<2>());
        else work(found, Count<1>());
    }
}

// out[t][r] = the dot product of x[t] and line r of a matrix; those `LINES` further on are read next
template <int T, int R, class E>
void shrink(const float* const* x, const E* matrix, int64_t inner, float* const* out) {
    Vec sums[T][R];
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) sums[t][r] = zero();
    int64_t i = 0;
    for (; i + LANES <= inner; i += LANES) {
        Vec lines[R];
        for (int r = 0; r < R; ++r) {
            lines[r] = load_any(matrix + r * inner + i);
            prefetch(matrix + (LINES + r) * inner, i);
        }
        for (int t = 0; t < T; ++t) {
            const Vec values = load(x[t] + i);
            for (int r = 0; r < R; ++r) sums[t][r] = fma(values, lines[r], sums[t][r]);
        }
    }
    if (i < inner) {
        const int n = (int)(inner - i);
        for (int t = 0; t < T; ++t)
            for (int r = 0; r < R; ++r)
                sums[t][r] = fma(get(x[t] + i, n), get_any(matrix + r * inner + i, n), sums[t][r]);
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) out[t][r] = sum(sums[t][r]);
}

template <int T, class E>
void shrink_lines(const float* const* x, const E* matrix, int64_t inner, int64_t lines, float* const* out) {
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

// to[t][i, i + C * LANES) = from + the sum over r of h[t][r] * up[r * stride + i]; n: lanes of the last vector
template <int T, int C, class E>
void expand_columns(const float* const* h, const E* up, int64_t stride, int64_t rank, int64_t i, int n,
                    const float* const* from, float* const* to) {
    Vec added[T][C];
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < C; ++c) added[t][c] = zero();
    for (int64_t r = 0; r < rank; ++r) {
        Vec line[C];
        for (int c = 0; c < C; ++c) {
            line[c] = get_any(up + r * stride + i + c * LANES, c + 1 < C ? LANES : n);
            prefetch(up + r * stride + COLUMNS, i + c * LANES);
        }
        for (int t = 0; t < T; ++t) {
            const Vec value = set(h[t][r]);
            for (int c = 0; c < C; ++c) added[t][c] = fma(value, line[c], added[t][c]);
        }
    }
    for (int t = 0; t < T; ++t)
        for (int c = 0; c < C; ++c) {
            const int64_t at = i + c * LANES;
            const int lanes = c + 1 < C ? LANES : n;
            prefetch(from[t] + COLUMNS, at);
            put(to[t] + at, add(get(from[t] + at, lanes), added[t][c]), lanes);
        }
}

template <int T, class E>
void expand(const float* const* h, const E* up, int64_t stride, int64_t rank, int64_t width, const float* const* from,
            float* const* to) {
    constexpr int C = LANES >= 16 ? 4 : 2;  // vectors whose sums stay in registers
    int64_t i = 0;
    for (; i + C * LANES <= width; i += C * LANES) expand_columns<T, C>(h, up, stride, rank, i, LANES, from, to);
    for (; i < width; i += LANES)
        expand_columns<T, 1>(h, up, stride, rank, i, width - i < LANES ? (int)(width - i) : LANES, from, to);
}

template <class E>
void shrink_all(const float* x, const E* down, const int32_t* tiles, const int32_t* ranks, float* shrunk,
                int64_t tokens, int64_t inner, int64_t pieces, int64_t max_rank) {
    const int64_t lines = pieces * max_rank, groups = (max_rank + LINES - 1) / LINES;
    share(count_tiles(tiles, tokens, 0) * pieces * groups, LINES * inner * most_in_tile(tokens), [&](int64_t i) {
        const int32_t* tile = tiles + i / (pieces * groups) * WIDTH;
        const int64_t slot = tile[0], first = i % groups * LINES, piece = i / groups % pieces;
        const int64_t left = ranks[slot] - first, wanted = left < LINES ? left : LINES;
        if (wanted <= 0) return;
        const E* matrix = down + (slot * lines + piece * max_rank + first) * inner;
        each_tokens(tile, [&](const int32_t* found, auto count) {
            constexpr int T = decltype(count)::value;
            const float* in[T];
            float* to[T];
            for (int t = 0; t < T; ++t) {
                in[t] = x + found[t] * inner;
                to[t] = shrunk + found[t] * lines + piece * max_rank + first;
            }
            shrink_lines<T>(in, matrix, inner, wanted, to);
        });
    });
}

template <class E>
void expand_all(const float* shrunk, const E* up, const int32_t* tiles, const int32_t* ranks, const int32_t* widths,
                float* out, int64_t tokens, int64_t pieces, int64_t max_rank, int64_t outputs) {
    const int64_t lines = pieces * max_rank;
    int64_t parts = 0;
    for (int64_t p = 0; p < pieces; ++p) parts += (widths[p] + COLUMNS - 1) / COLUMNS;
    share(count_tiles(tiles, tokens, 0) * parts, max_rank * COLUMNS * most_in_tile(tokens), [&](int64_t i) {
        const int32_t* tile = tiles + i / parts * WIDTH;
        const int64_t slot = tile[0], rank = ranks[slot];
        int64_t piece = 0, start = 0, part = i % parts;
        for (; part >= (widths[piece] + COLUMNS - 1) / COLUMNS; ++piece) {
            part -= (widths[piece] + COLUMNS - 1) / COLUMNS;
            start += widths[piece];
        }
        const int64_t inside = part * COLUMNS, rest = widths[piece] - inside;
        const int64_t column = start + inside, width = rest < COLUMNS ? rest : COLUMNS;
        if (rank == 0) return;
        each_tokens(tile, [&](const int32_t* found, auto count) {
            constexpr int T = decltype(count)::value;
            const float* h[T];
            float* to[T];
            for (int t = 0; t < T; ++t) {
                h[t] = shrunk + found[t] * lines + piece * max_rank;
                to[t] = out + found[t] * outputs + column;
            }
            expand<T>(h, up + slot * max_rank * outputs + column, outputs, rank, width, to, to);
        });
    });
}

// The same into a place of its own, gates and what they gate beside each other, and from there the activation.
template <class E>
void expand_gated_all(const float* x, const float* shrunk, const E* up, const int32_t* tiles, const int32_t* ranks,
                      float* out, int64_t tokens, int64_t max_rank, int64_t width, int activation) {
    const int64_t parts = (width + COLUMNS - 1) / COLUMNS;
    share(count_tiles(tiles, tokens, -1) * parts, max_rank * COLUMNS * most_in_tile(tokens), [&](int64_t i) {
        const int32_t* tile = tiles + i / parts * WIDTH;
        const int64_t slot = tile[0], rank = slot < 0 ? 0 : ranks[slot], column = i % parts * COLUMNS;
        const int64_t rest = width - column, count_columns = rest < COLUMNS ? rest : COLUMNS;
        each_tokens(tile, [&](const int32_t* found, auto count) {
            constexpr int T = decltype(count)::value;
            alignas(64) float sums[2][T][COLUMNS];
            const float* from[2][T];
            for (int side = 0; side < 2; ++side) {
                const float* h[T];
                float* to[T];
                for (int t = 0; t < T; ++t) {
                    from[side][t] = x + (found[t] * 2 + side) * width + column;
                    h[t] = shrunk + (found[t] * 2 + side) * max_rank;
                    to[t] = sums[side][t];
                }
                if (rank == 0) continue;
                const E* matrix = up + slot * max_rank * 2 * width + side * width + column;
                expand<T>(h, matrix, 2 * width, rank, count_columns, from[side], to);
                for (int t = 0; t < T; ++t) from[side][t] = to[t];
            }
            for (int t = 0; t < T; ++t)
                gate_parts(from[0][t], from[1][t], out + found[t] * width + column, count_columns, activation);
        });
    });
}

}  // namespace

void shrink_lora(const float* x, const void* down, int is_half, const int32_t* tiles, const int32_t* ranks,
                 float* shrunk, int64_t tokens, int64_t inner, int64_t pieces, int64_t max_rank) {
    if (is_half) shrink_all(x, (const uint16_t*)down, tiles, ranks, shrunk, tokens, inner, pieces, max_rank);
    else shrink_all(x, (const float*)down, tiles, ranks, shrunk, tokens, inner, pieces, max_rank);
}

void expand_lora(const float* shrunk, const void* up, int is_half, const int32_t* tiles, const int32_t* ranks,
                 const int32_t* widths, float* out, int64_t tokens, int64_t pieces, int64_t max_rank,
                 int64_t outputs) {
    if (is_half)
        expand_all(shrunk, (const uint16_t*)up, tiles, ranks, widths, out, tokens, pieces, max_rank, outputs);
    else
        expand_all(shrunk, (const float*)up, tiles, ranks, widths, out, tokens, pieces, max_rank, outputs);
}

void expand_lora_gated(const float* x, const float* shrunk, const void* up, int is_half, const int32_t* tiles,
                       const int32_t* ranks, float* out, int64_t tokens, int64_t max_rank, int64_t width,
                       int activation) {
    if (is_half)
        expand_gated_all(x, shrunk, (const uint16_t*)up, tiles, ranks, out, tokens, max_rank, width, activation);
    else
        expand_gated_all(x, shrunk, (const float*)up, tiles, ranks, out, tokens, max_rank, width, activation);
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
void look_up_lora(const int64_t* ids, const void* down, int is_half, const int32_t* slots, float* shrunk,
                  int64_t count, int64_t max_rank, int64_t tokens) {
    for (int64_t t = 0; t < count; ++t) {
        if (slots[t] < 0) continue;
        const int64_t first = slots[t] * max_rank * tokens + ids[t];
        for (int64_t r = 0; r < max_rank; ++r) {
            const int64_t at = first + r * tokens;
            if (is_half) store_part(shrunk + t * max_rank + r, get_any((const uint16_t*)down + at, 1), 1);
            else shrunk[t * max_rank + r] = ((const float*)down)[at];
        }
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
