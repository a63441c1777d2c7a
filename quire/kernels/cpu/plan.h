// What matmuls of floats and of integers share: the plan that matrix.py builds, the tiles, how they are shared among
// threads, and how results are stored.
#pragma once
#include <utility>

#include "panels.h"

namespace quire {
namespace QUIRE_NS {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 9, TILE_PANELS = 3, DIRECT_PANELS = 2, MOST_DIRECT_ROWS = 4;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 1, DIRECT_PANELS = 2, MOST_DIRECT_ROWS = 1;
#else
constexpr int TILE_ROWS = 2, TILE_PANELS = 1, DIRECT_PANELS = 1, MOST_DIRECT_ROWS = 1;
#endif
constexpr int TILE_WIDTH = TILE_PANELS * PANEL, TILE_VECS = TILE_PANELS * VECS;
constexpr int64_t CHUNK_ROWS = 252;      // rows of x that pass by a tile before it is given up
constexpr int64_t NEIGHBOURS = 64;       // rows up to which a thread should go through neighbouring panels
constexpr int64_t LEAST_WORK = 1 << 15;  // multiplications that are worth a thread's attention

struct Segment {
    const uint8_t* panels;
    int64_t format, outputs;
};

// What matrix.py builds: inner, floats from one row of results to the next (the outputs of all segments, or more), bias
// and order (addresses or 0), segments, and then each segment.
struct Plan {
    int64_t inner, outputs;
    const float* bias;
    const int32_t* order;  // which column of x each element along k is multiplied with; null: its own
    int64_t num_segments;
    Segment segments[1];

    const float* bias_at(int64_t column) const { return bias ? bias + column : nullptr; }
};

static inline void copy_in_order(const Plan& plan, const float* from, float* to) {
    if (!plan.order) {
        std::memcpy(to, from, plan.inner * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < plan.inner; ++i) to[i] = from[plan.order[i]];
}

// x [rows, inner], or its copy whose columns are in the plan's order.
static inline const float* in_order(const Plan& plan, const float* x, int64_t rows) {
    if (!plan.order) return x;
    float* copy = (float*)scratch(8, rows * plan.inner * sizeof(float));
    parallel(rows, 1 + LEAST_WORK / plan.inner, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) copy_in_order(plan, x + r * plan.inner, copy + r * plan.inner);
    });
    return copy;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of rows are even: if there are more than MOST_DIRECT_ROWS, none is smaller than this.
constexpr int LEAST_ROWS = MOST_DIRECT_ROWS < (TILE_ROWS - 1) / 2 ? MOST_DIRECT_ROWS + 1 : (TILE_ROWS + 1) / 2;

// T<FIRST>::run, ..., T<LAST>::run, by the number of rows.
template <template <int> class T, int FIRST = LEAST_ROWS, int LAST = TILE_ROWS,
          class = std::make_integer_sequence<int, LAST - FIRST + 1>>
struct Table;
template <template <int> class T, int FIRST, int LAST, int... I>
struct Table<T, FIRST, LAST, std::integer_sequence<int, I...>> {
    static constexpr decltype(&*T<FIRST>::run) run[] = {T<FIRST + I>::run...};
    static auto of(int64_t rows) { return run[rows - FIRST]; }
};

// N vectors of columns, of which [0, width) are wanted.
template <int N>
static inline void store_columns(const Vec* v, float* p, int64_t width, const float* bias) {
    if (width >= N * LANES && !bias) {
        unrolled<N>([&](auto i) __attribute__((always_inline)) { store(p + i.value * LANES, v[i.value]); });
    } else {
        unrolled<N>([&](auto i) __attribute__((always_inline)) {
            const int64_t left = width - i.value * LANES;
            if (left <= 0) return;
            const int n = (int)least(left, LANES);
            put(p + i.value * LANES, bias ? add(v[i.value], get(bias + i.value * LANES, n)) : v[i.value], n);
        });
    }
}

// Where the lines of a tile's result are: fetched while the sums are made. Stores that wait for them were a tenth of the
// time.
template <int ROWS, int PANELS = TILE_PANELS>
static inline void prefetch_results(const float* out, int64_t stride) {
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) __builtin_prefetch(out + r * stride + p * PANEL, 1);
}

// f(segment, begin, end, column) for the parts of [begin, end) that lie in each segment, which has ceil(outputs / unit)
// indices.
template <class F>
static inline void split(const Plan& plan, int64_t unit, int64_t begin, int64_t end, const F& f) {
    int64_t start = 0, column = 0;
    for (int64_t s = 0; s < plan.num_segments; ++s) {
        const Segment& segment = plan.segments[s];
        const int64_t count = ceil_div(segment.outputs, unit);
        const int64_t from = begin > start ? begin - start : 0, to = least(end - start, count);
        if (from < to) f(segment, from, to, column);
        start += count;
        column += segment.outputs;
    }
}

static inline int64_t units(const Plan& plan, int64_t unit) {
    int64_t count = 0;
    for (int64_t s = 0; s < plan.num_segments; ++s) count += ceil_div(plan.segments[s].outputs, unit);
    return count;
}

// ---- few rows
// f(rows as a constant) for a number of rows from 1 to MOST.
template <int MOST, class F>
static inline void with_rows(int64_t rows, const F& f) {
    unrolled<MOST>([&](auto index) {
        if (rows == index.value + 1) f(Index<decltype(index)::value + 1>());
    });
}

// f(panel, bytes to the next, column, width) for each DIRECT_PANELS of the panels [begin, end).
template <int F, class Function>
static inline void direct_panels(int64_t inner, const Segment& segment, int64_t begin, int64_t end, const Function& f) {
    const int64_t panel_bytes = LAYOUTS[F].panel_bytes(inner);
    while (begin < end) {
        // A panel on its own is multiplied several times at once; the first result counts.
        const bool full = end - begin >= DIRECT_PANELS;
        const int64_t column = begin * PANEL, left = segment.outputs - column, apart = full ? panel_bytes : 0;
        const int64_t width = full ? left : least(left, PANEL);
        f(segment.panels + begin * panel_bytes, apart, column, width);
        begin += full ? DIRECT_PANELS : 1;
    }
}

// f(segment, first panel, end, column) on all threads.
template <class F>
static inline void share_panels(const Plan& plan, int64_t rows, const F& f) {
    constexpr int64_t UNIT = PANEL * DIRECT_PANELS;
    const int64_t count = units(plan, UNIT);
    // A thread should go through neighbouring panels, which it fetches ahead, and all should have as many.
    const int64_t most = count / num_threads(), each = most < 64 ? 2 : ceil_div(most, 32);
    int64_t grain = most / each;
    if (grain * plan.inner * UNIT * rows < LEAST_WORK) grain = 1 + LEAST_WORK / (plan.inner * UNIT * rows);
    parallel(count, grain, [&](int64_t begin, int64_t end) {
        split(plan, UNIT, begin, end, [&](const Segment& segment, int64_t from, int64_t to, int64_t column) {
            f(segment, from * DIRECT_PANELS, least(to * DIRECT_PANELS, ceil_div(segment.outputs, PANEL)), column);
        });
    });
}

// ---- many rows
// Rows of x in blocks of at most `most_rows`, as even as can be, and elements along k in tiles `depth` deep.
struct Blocks {
    int64_t rows, inner, count, depth;

    Blocks(int64_t rows, int64_t inner, int64_t most_depth, int64_t most_rows = TILE_ROWS)
        : rows(rows), inner(inner), count(ceil_div(rows, most_rows)),
          depth(ceil_div(ceil_div(inner, ceil_div(inner, most_depth)), BLOCK) * BLOCK) {}
    int64_t start(int64_t block) const { return rows * block / count; }
    int64_t size(int64_t block) const { return start(block + 1) - start(block); }
    int64_t tiles() const { return ceil_div(inner, depth); }
    int64_t deep(int64_t k) const { return least(depth, inner - k); }
};

// f(block, k, depth) for every block of rows and tile along k, on all threads.
template <class F>
static inline void share_blocks(const Blocks& x, const F& f) {
    parallel(x.count, 1 + LEAST_WORK / (x.inner * TILE_ROWS), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b)
            for (int64_t k = 0; k < x.inner; k += x.depth) f(b, k, x.deep(k));
    });
}

// f(segment, first panel of a tile of PANELS, first block of rows, end, column) on all threads.
template <int PANELS = TILE_PANELS, class F>
static inline void share_tiles(const Plan& plan, const Blocks& x, const F& f) {
    constexpr int64_t UNIT = PANELS * PANEL;
    const int64_t tiles = units(plan, UNIT), chunks = ceil_div(x.rows, CHUNK_ROWS);
    int64_t grain = 1 + LEAST_WORK / (plan.inner * UNIT * x.rows);
    // Fine enough that a thread which the system holds up does not hold up the others.
    if (x.rows <= NEIGHBOURS && tiles / (8 * num_threads()) > grain) grain = tiles / (8 * num_threads());
    parallel(tiles * chunks, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t chunk = i / tiles, tile = i % tiles;
            const int64_t first = x.count * chunk / chunks, last = x.count * (chunk + 1) / chunks;
            split(plan, UNIT, tile, tile + 1, [&](const Segment& segment, int64_t at, int64_t, int64_t column) {
                f(segment, at * PANELS, first, last, column);
            });
        }
    });
}

// few(x, out, rows) for up to `most_few` rows, or many(x, out, rows) for parts of the rows of which at most `most_packed`
// elements of x are packed: they should still be in the caches when they are read.
template <class Few, class Many>
static inline void multiply_rows(const Plan& plan, const float* x, float* out, int64_t rows, int64_t most_few,
                                 int64_t most_packed, const Few& few, const Many& many) {
    if (rows <= 0) return;
    if (rows <= most_few) return few(x, out, rows);
    const int64_t fit = most_packed / plan.inner, parts = ceil_div(rows, fit > CHUNK_ROWS ? fit : CHUNK_ROWS);
    for (int64_t i = 0; i < parts; ++i) {
        const int64_t begin = rows * i / parts, end = rows * (i + 1) / parts;
        many(x + begin * plan.inner, out + begin * plan.outputs, end - begin);
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
