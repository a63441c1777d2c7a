// One tile of keys and values beside query rows: scores, their weights, and the weighted sums of values.
//
// A tile gives each row a maximum, a sum of weights and a sum of values on its own, which `join` merges with what the row
// has. Keys that a row must not see weigh exactly zero, so that rows of different reach can be computed together.
#pragma once
#include "kv_cache.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int TILE = 64;
constexpr int TILE_VECTORS = TILE / LANES;
constexpr int MAX_ROWS = 6;                   // query rows whose sums are in registers together
constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // vectors of keys, or of a value, beside them
constexpr int BATCH = 48;                     // query rows whose weights are kept together
constexpr float NOTHING = -3e38f;             // finite: two of them have a difference
constexpr float LOG2_E = 1.44269504f;

// The format of a tile that was copied from the cache.
struct Unpacked : Float32 {};
template <class Format>
constexpr bool IN_CACHE = true;
template <>
constexpr bool IN_CACHE<Unpacked> = false;

// Where the keys and values of one tile are: in the cache, or unpacked to float32 for many query rows.
template <class Format>
struct Tile {
    using Element = typename Format::Element;
    const Element* column[TILE_VECTORS];  // LANES neighbouring keys; the next dimension is `stride` elements on
    int64_t stride;
    const Element* line[TILE];                                   // a value
    const float *key_scales = nullptr, *value_scales = nullptr;  // [TILE] if the cache has them
};

// The running result of query rows. `highest` is a score times log2(e).
struct State {
    float *highest, *total, *sums;  // [count], [count], [count, padded_dim]
    static int64_t size(int64_t count, int64_t padded) { return count * (padded + 2); }
    static State at(float* memory, int64_t count, int64_t padded) {
        return {memory + count * padded, memory + count * padded + count, memory};
    }
    void clear(int64_t count, int64_t padded) const {
        std::memset(sums, 0, sizeof(float) * count * padded);
        for (int64_t i = 0; i < count; ++i) highest[i] = NOTHING, total[i] = 0;
    }
};

// Which tokens of a sequence are kept here: of every `ranks` * `block` tokens the `rank`-th `block`, one after the other.
struct Split {
    int64_t ranks, rank, block;
    // How many of the first `count` tokens.
    int64_t own(int64_t count) const {
        if (ranks == 1) return count;
        const int64_t rest = count % (ranks * block) - rank * block;
        return count / (ranks * block) * block + (rest < 0 ? 0 : rest < block ? rest : block);
    }
};

// What query rows get from one tile. Row i is a head of token position + i / group.
template <class Format>
struct TileWork {
    const float* q;  // [count, dim], scaled
    const Tile<Format>&data, &next;                       // next: what is fetched meanwhile
    int64_t start, dim, padded, group, window, position;  // start: the tile's first key
    int64_t length;  // of what is attended to of the prompt, where tokens see those after them too; else 0
    float soft_cap;
    Split split;  // start counts what is kept here, position all tokens
};

// Where what a token at this position sees begins: with its window, below 0 too; a negative window is the size of chunks.
inline int64_t first_in_window(int64_t window, int64_t position) {
    return window > 0 ? position - window + 1 : window < 0 ? position / -window * -window : 0;
}

// Of the tile's keys, row i sees those in [low[i], high[i]); both grow with i.
struct Reach {
    int low[BATCH], high[BATCH];
    template <class Format>
    Reach(const TileWork<Format>& work, int64_t first, int64_t count) {
        int64_t token = first / work.group, head = first % work.group;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t position = work.position + token, own = position - work.start;
            const int64_t first_key = first_in_window(work.window, position);
            const int64_t begin = (first_key > 0 ? work.split.own(first_key) : 0) - work.start;
            int64_t end = work.split.own(position + 1) - work.start;
            if (work.length > 0) {
                const int64_t all = work.length - work.start;
                end = work.window > 0 && own + work.window < all ? own + work.window : all;
            }
            high[i] = end < 0 ? 0 : end < TILE ? (int)end : TILE;
            low[i] = begin < 0 ? 0 : begin < high[i] ? (int)begin : high[i];  // a window may lie behind all keys
            if (++head == work.group) head = 0, ++token;
        }
    }
};

template <class Format>
TileWork(const float*, const Tile<Format>&, const Tile<Format>&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
         int64_t, float, Split) -> TileWork<Format>;

template <int ROWS, int WIDTH, class Format>
inline void score_columns(const TileWork<Format>& work, const float* q, int first, float* scores) {
    const Tile<Format>& tile = work.data;
    const typename Format::Element *column[WIDTH], *ahead[WIDTH];
    Vec acc[ROWS][WIDTH];
    for (int c = 0; c < WIDTH; ++c) column[c] = tile.column[first + c], ahead[c] = work.next.column[first + c];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c) acc[r][c] = zero();
    for (int64_t d = 0; d < work.dim; ++d) {
        Vec key[WIDTH];
        for (int c = 0; c < WIDTH; ++c) {
            key[c] = Format::read(column[c] + d * tile.stride);
            if (IN_CACHE<Format>) fetch(ahead[c] + d * tile.stride);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vec x = set(q[r * work.dim + d]);
            for (int c = 0; c < WIDTH; ++c) acc[r][c] = fma(x, key[c], acc[r][c]);
        }
    }
    for (int c = 0; c < WIDTH; ++c) {
        const int at = (first + c) * LANES;
        const Vec scale = tile.key_scales ? load(tile.key_scales + at) : set(1.0f);
        for (int r = 0; r < ROWS; ++r)
            store(scores + r * TILE + at, tile.key_scales ? mul(acc[r][c], scale) : acc[r][c]);
    }
}

// Scores of the keys before `most`, in whole vectors.
template <int ROWS, class Format>
inline void score(const TileWork<Format>& work, const float* q, int most, float* scores) {
    int first = 0;
    for (; first * LANES + (COLUMNS - 2) * LANES < most; first += COLUMNS)
        score_columns<ROWS, COLUMNS>(work, q, first, scores);
    for (; first * LANES < most; first += 2) score_columns<ROWS, 2>(work, q, first, scores);
}

// soft_cap * tanh(score / soft_cap), times log2(e) as all scores are
inline void cap_scores(float* scores, int most, float soft_cap) {
    const Vec cap = set(LOG2_E * soft_cap), twice = set(2 * LOG2_E * soft_cap), factor = set(2 / soft_cap);
    const Vec one = set(1.0f);
    for (int i = 0; i < most; i += LANES)
        store(scores + i, sub(cap, div(twice, add(exp(mul(load(scores + i), factor)), one))));
}

// The part of a vector of keys from `i` on that lies in [low, high); the rest from `other`.
inline Vec inside(int i, int low, int high, Vec v, Vec other) {
    const int from = low - i, to = high - i;
    return only_lanes(v, from < 0 ? 0 : from > LANES ? LANES : from, to < 0 ? 0 : to > LANES ? LANES : to, other);
}

inline float highest_score(const float* scores, int low, int high) {
    Vec most = set(NOTHING);
    if (low == 0 && high == TILE)
        for (int i = 0; i < TILE; i += LANES) most = vmax(most, load(scores + i));
    else
        for (int i = 0; i < high; i += LANES) most = vmax(most, inside(i, low, high, load(scores + i), most));
    return max_lane(most);
}

// Scores, of which the row sees those in [low, high), become weights: 2^(score - highest). Returns their sum.
inline float weigh(float* scores, int low, int high, float highest, const float* value_scales) {
    const Vec shift = set(highest);
    Sum16 sums;
    const auto use = [&](int i, Vec weight) {
        sums.part[i / LANES % Sum16::PARTS] = add(sums.part[i / LANES % Sum16::PARTS], weight);
        store(scores + i, value_scales ? mul(weight, load(value_scales + i)) : weight);
    };
    if (low == 0 && high == TILE)
        for (int i = 0; i < TILE; i += LANES) use(i, exp2_below(sub(load(scores + i), shift)));
    else
        for (int i = 0; i < high; i += LANES)
            use(i, inside(i, low, high, exp2_below(sub(load(scores + i), shift)), zero()));
    return sums.total();
}

// Merge the maxima and sums of `count` rows; what makes the rows' sums of values is multiplied by these factors.
struct Factors {
    float *old_one, *new_one;
};
inline void join(int64_t count, float* highest, float* total, const float* new_highest, const float* new_total,
                 Factors factors) {
    map(count, [&](int64_t i, int n) {
        const Vec mine = get(highest + i, n), other = get(new_highest + i, n), both = vmax(mine, other);
        const Vec old_one = exp2_below(sub(mine, both)), new_one = exp2_below(sub(other, both));
        put(factors.old_one + i, old_one, n);
        put(factors.new_one + i, new_one, n);
        put(highest + i, both, n);
        put(total + i, fma(get(total + i, n), old_one, mul(get(new_total + i, n), new_one)), n);
    });
}

template <int ROWS, int WIDTH, class Format>
inline void add_columns(const TileWork<Format>& work, const float* weights, int64_t low, int64_t high, int64_t d,
                        const float* old_one, const float* new_one, float* sums) {
    Vec acc[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c) acc[r][c] = zero();
    for (int64_t k = low; k < high; ++k) {
        Vec value[WIDTH];
        for (int c = 0; c < WIDTH; ++c) {
            value[c] = Format::read(work.data.line[k] + d + c * LANES);
            if (IN_CACHE<Format>) fetch(work.next.line[k] + d + c * LANES);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vec weight = set(weights[r * TILE + k]);
            for (int c = 0; c < WIDTH; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        const Vec before = set(old_one[r]), now = set(new_one[r]);
        for (int c = 0; c < WIDTH; ++c) {
            float* sum = sums + r * work.padded + d + c * LANES;
            store(sum, fma(load(sum), before, mul(acc[r][c], now)));
        }
    }
}

template <int ROWS, class Format>
inline void add_values(const TileWork<Format>& work, const float* weights, int64_t low, int64_t high,
                       const float* old_one, const float* new_one, float* sums) {
    int64_t d = 0;
    for (; d + COLUMNS * LANES <= work.padded; d += COLUMNS * LANES)
        add_columns<ROWS, COLUMNS>(work, weights, low, high, d, old_one, new_one, sums);
    for (; d < work.padded; d += LANES)
        add_columns<ROWS, 1>(work, weights, low, high, d, old_one, new_one, sums);
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Call f with a number of 1..MAX_ROWS that the compiler knows.
template <class F>
inline void with_rows(int64_t rows, F f) {
    switch (rows) {
        case 1: return f(Count<1>());
        case 2: return f(Count<2>());
        case 3: return f(Count<3>());
        case 4: return f(Count<4>());
        case 5: return f(Count<5>());
        default: return f(Count<MAX_ROWS>());
    }
}

// Up to BATCH rows from row `first` on: all scores, all weights, then all sums of values. `meanwhile` is called beside
// both, once for each MAX_ROWS rows.
template <class Format, class F>
void attend_batch(const TileWork<Format>& work, int64_t first, int64_t count, State state, F& meanwhile) {
    alignas(64) float scores[BATCH * TILE], highest[BATCH], total[BATCH], old_one[BATCH], new_one[BATCH];
    const Reach reach(work, first, count);
    const int64_t groups = (count + MAX_ROWS - 1) / MAX_ROWS;
    const auto each_group = [&](auto f) {  // f(its first row, rows, its keys); rows are alike in number
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t row = g * count / groups, end = (g + 1) * count / groups;
            // The first row sees the earliest keys and the last one the latest.
            const int least = reach.low[row], most = reach.high[end - 1];
            if (least < most) with_rows(end - row, [&](auto rows) { f(row, rows, least, most); });
        }
    };
    for (int64_t r = 0; r < count; ++r) highest[r] = NOTHING, total[r] = 0;
    each_group([&](int64_t row, auto rows, int, int most) {
        meanwhile();
        score<rows.value>(work, work.q + (first + row) * work.dim, most, scores + row * TILE);
    });
    // First all maxima and then all weights: one after the other they would wait for each other.
    each_group([&](int64_t row, auto rows, int, int most) {
        for (int64_t r = row; r < row + rows.value; ++r) {
            if (work.soft_cap > 0) cap_scores(scores + r * TILE, most, work.soft_cap);
            highest[r] = highest_score(scores + r * TILE, reach.low[r], reach.high[r]);
        }
    });
    each_group([&](int64_t row, auto rows, int, int most) {
        for (int64_t r = row; r < row + rows.value; ++r) {
            float* line = scores + r * TILE;
            const int high = reach.high[r];
            total[r] = weigh(line, reach.low[r], high, highest[r], work.data.value_scales);
            for (int k = (high + LANES - 1) / LANES * LANES; k < most; ++k) line[k] = 0;
        }
    });
    join(count, state.highest + first, state.total + first, highest, total, {old_one, new_one});
    each_group([&](int64_t row, auto rows, int least, int most) {
        meanwhile();
        add_values<rows.value>(work, scores + row * TILE, least, most, old_one + row, new_one + row,
                               state.sums + (first + row) * work.padded);
    });
}

template <class Format, class F>
void attend_tile(const TileWork<Format>& work, int64_t count, State state, F meanwhile) {
    for (int64_t first = 0; first < count; first += BATCH)
        attend_batch(work, first, count - first < BATCH ? count - first : BATCH, state, meanwhile);
}

}  // namespace
}  // namespace QUIRE_NS
}  // namespace quire
