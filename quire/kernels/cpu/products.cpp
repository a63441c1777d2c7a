// Products of float32 rows with packed weights: out = x @ w^T + bias. Every output element is summed over k from the
// first to the last, whatever the number of rows and wherever a row stands in them, so results never depend on the
// batch.
#include "panels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 9, TILE_PANELS = 3, DIRECT_PANELS = 2, MOST_DIRECT_ROWS = 4;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 1, DIRECT_PANELS = 2, MOST_DIRECT_ROWS = 1;
#else
constexpr int TILE_ROWS = 2, TILE_PANELS = 1, DIRECT_PANELS = 1, MOST_DIRECT_ROWS = 1;
#endif
constexpr int TILE_WIDTH = TILE_PANELS * PANEL;
// Elements along k that a tile of weights holds: in one block of rows, and for several. The latter leaves room for a
// block of x beside it in the first-level cache.
constexpr int64_t FEW = 64, DEPTH = 192;
constexpr int64_t CHUNK_ROWS = 252;  // rows of x that pass by a tile before it is given up
constexpr int64_t LEAST_PACKED = 4;  // blocks of rows from which on x is packed
// Elements of x that are packed at a time: they should still be in the caches when they are read.
constexpr int64_t MOST_PACKED = 1 << 19;

constexpr int64_t NEIGHBOURS = 64;       // rows up to which a thread should go through neighbouring panels
constexpr int64_t LEAST_WORK = 1 << 15;  // multiplications that are worth a thread's attention

struct Segment {
    const uint8_t* panels;
    int64_t format, outputs;
};

// What matrix.py builds: inner, outputs of all segments, bias (an address or 0), segments, and then each segment.
struct Plan {
    int64_t inner, outputs;
    const float* bias;
    int64_t num_segments;
    Segment segments[1];
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// N vectors of columns, of which [0, width) are wanted.
template <int N>
inline void store_columns(const Vec* v, float* p, int64_t width, const float* bias) {
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

// What will be read next from the place of step `j`, `PANELS` panels further on, once per cache line. The hardware does
// not see that panels are read side by side; this was measured to take a third off the time of one row.
template <int F, int PANELS>
inline void prefetch(const uint8_t* codes, int64_t panel_stride, int j) {
    constexpr int STEPS = STEP_BYTES<F> < 64 ? 64 / STEP_BYTES<F> : 1;  // in a line
    if (j / LAYOUTS[F].step % STEPS != 0) return;
    for (int p = 0; p < PANELS; ++p) __builtin_prefetch(codes + (PANELS + p) * panel_stride);
}

// Elements [from, from + depth) along k of one panel as float32 [depth][PANEL], TILE_WIDTH apart; both are multiples of
// BLOCK.
template <int F>
void expand(const uint8_t* panel, int64_t inner, int64_t from, int64_t depth, float* out) {
    constexpr Layout L = LAYOUTS[F];
    const int64_t ahead = TILE_PANELS * L.panel_bytes(inner);
    const uint8_t* scale_at = panel + from / L.group * L.scales_per_group();
    const uint8_t* code_at = panel + L.codes_at(inner) + from / L.step * STEP_BYTES<F>;
    for (int64_t k = 0; k < depth; k += L.group) {
        Scales<F> scales;
        scales.load_group(scale_at);
        __builtin_prefetch(scale_at + ahead);
        scale_at += L.scales_per_group();
        for (int j = 0; j < L.group; j += L.step) {
            Codes<F> codes;
            codes.load_step(code_at);
            prefetch<F, 1>(code_at, ahead, j);
            code_at += STEP_BYTES<F>;
            unrolled<L.step>([&](auto index) __attribute__((always_inline)) {
                constexpr int I = decltype(index)::value;
                for (int v = 0; v < VECS; ++v) store(out + v * LANES, codes.template weight<I>(scales, v));
                out += TILE_WIDTH;
            });
        }
    }
}

// ---- few rows: weights are made in registers and used at once
// DIRECT_PANELS panels, `panel_stride` bytes apart, of which `width` columns are wanted.
template <int F, int ROWS>
void direct(const float* x, int64_t inner, const uint8_t* panel, int64_t panel_stride, float* out, int64_t stride,
            int64_t width, const float* bias) {
    constexpr Layout L = LAYOUTS[F];
    constexpr int PANELS = DIRECT_PANELS;
    Vec acc[ROWS][PANELS * VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < PANELS * VECS; ++v) acc[r][v] = zero();
    const uint8_t *scale_at = panel, *code_at = panel + L.codes_at(inner);
    int64_t k = 0;
    for (; k + L.group <= inner; k += L.group) {
        Scales<F> scales[PANELS];
        for (int p = 0; p < PANELS; ++p) scales[p].load_group(scale_at + p * panel_stride);
        for (int p = 0; p < PANELS; ++p) __builtin_prefetch(scale_at + (PANELS + p) * panel_stride);
        scale_at += L.scales_per_group();
        for (int j = 0; j < L.group; j += L.step) {
            Codes<F> codes[PANELS];
            for (int p = 0; p < PANELS; ++p) codes[p].load_step(code_at + p * panel_stride);
            prefetch<F, PANELS>(code_at, panel_stride, j);
            code_at += STEP_BYTES<F>;
            const float* at = x + k + j;
            unrolled<L.step>([&](auto index) __attribute__((always_inline)) {
                constexpr int I = decltype(index)::value;
                Vec xs[ROWS];
                for (int r = 0; r < ROWS; ++r) xs[r] = set(at[r * inner + I]);
                for (int p = 0; p < PANELS; ++p)
                    for (int v = 0; v < VECS; ++v) {
                        const Vec w = codes[p].template weight<I>(scales[p], v);
                        for (int r = 0; r < ROWS; ++r) acc[r][p * VECS + v] = fma(xs[r], w, acc[r][p * VECS + v]);
                    }
            });
        }
    }
    if (k < inner) {
        float weights[BLOCK * TILE_WIDTH];
        for (int p = 0; p < PANELS; ++p) {
            expand<F>(panel + p * panel_stride, inner, k / BLOCK * BLOCK, BLOCK, weights);
            for (int64_t i = k; i < inner; ++i)
                for (int v = 0; v < VECS; ++v)
                    for (int r = 0; r < ROWS; ++r)
                        acc[r][p * VECS + v] =
                            fma(set(x[r * inner + i]), load(weights + i % BLOCK * TILE_WIDTH + v * LANES),
                                acc[r][p * VECS + v]);
        }
    }
    unrolled<ROWS>([&](auto r) { store_columns<PANELS * VECS>(acc[r.value], out + r.value * stride, width, bias); });
}

// Panels [begin, end) of a segment for at most MOST_DIRECT_ROWS rows.
template <int F>
void direct_panels(const float* x, int64_t rows, int64_t inner, const Segment& segment, int64_t begin, int64_t end,
                   float* out, int64_t stride, const float* bias) {
    const int64_t panel_bytes = LAYOUTS[F].panel_bytes(inner);
    while (begin < end) {
        // A panel on its own is multiplied several times at once; the first result counts.
        const bool full = end - begin >= DIRECT_PANELS;
        const int64_t column = begin * PANEL, left = segment.outputs - column, apart = full ? panel_bytes : 0;
        const int64_t width = full ? left : least(left, PANEL);
        const uint8_t* panel = segment.panels + begin * panel_bytes;
        const float* shift = bias ? bias + column : nullptr;
        unrolled<MOST_DIRECT_ROWS>([&](auto index) {
            constexpr int ROWS = decltype(index)::value + 1;
            if (rows == ROWS) direct<F, ROWS>(x, inner, panel, apart, out + column, stride, width, shift);
        });
        begin += full ? DIRECT_PANELS : 1;
    }
}

// ---- many rows: weights are made once per tile, which all rows of a chunk pass by
using Expand = void (*)(const uint8_t* panel, int64_t inner, int64_t from, int64_t depth, float* out);

struct Tile {
    float* weights;  // [depth][TILE_WIDTH]
    int64_t depth, width;
    bool first, last;   // of the tiles along k: starts from zero, ends in `out`; others hand over sums
    const float* bias;  // added by the last
    // Where `weights` are made as they are needed, FEW elements along k at a time; null if they are there.
    Expand expand;
    const uint8_t* panel;
    int64_t num_panels, panel_stride, inner;
};

// x is [ROWS][x_stride], or where PACKED [depth][ROWS], which reads one line after the other. `sums` [ROWS][TILE_WIDTH]
// have a place of their own because rows of `out` may be a multiple of 4 KiB apart, which puts them all into one set of
// the first-level cache.
template <int ROWS, bool PACKED>
void multiply(const Tile& tile, const float* x, int64_t x_stride, float* sums, float* out, int64_t out_stride) {
    constexpr int COLUMNS = TILE_PANELS * VECS;
    Vec acc[ROWS][COLUMNS];
    if (tile.first)
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < COLUMNS; ++v) acc[r][v] = zero();
    else
        unrolled<ROWS * COLUMNS>([&](auto i) __attribute__((always_inline)) {
            acc[i.value / COLUMNS][i.value % COLUMNS] = load(sums + i.value * LANES);
        });
    // The lines of `out` are fetched while the sums are made: stores that wait for them were a tenth of the time.
    if (PACKED && tile.last)
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < TILE_PANELS; ++p) __builtin_prefetch(out + r * out_stride + p * PANEL, 1);
    const int64_t span = tile.expand ? FEW : tile.depth;
    // Rows are reached from two pointers, so that few registers hold addresses.
    constexpr int REACH = 5;
    const float *x0 = x, *x1 = x + REACH * x_stride;
    for (int64_t from = 0; from < tile.depth; from += span) {
        if (!PACKED && tile.expand)
            for (int64_t p = 0; p < tile.num_panels; ++p)
                tile.expand(tile.panel + p * tile.panel_stride, tile.inner, from,
                            least(FEW, ceil_div(tile.depth - from, BLOCK) * BLOCK), tile.weights + p * PANEL);
        const float *w = tile.weights, *end = w + least(span, tile.depth - from) * TILE_WIDTH;
        for (; w != end; w += TILE_WIDTH) {
            Vec ws[COLUMNS];
            for (int v = 0; v < COLUMNS; ++v) ws[v] = load(w + v * LANES);
            for (int r = 0; r < ROWS; ++r) {
                const float* base = r < REACH ? x0 : x1;
                const Vec xs = set(PACKED ? x[r] : base[(r % REACH) * x_stride]);
                for (int v = 0; v < COLUMNS; ++v) acc[r][v] = fma(xs, ws[v], acc[r][v]);
            }
            if constexpr (PACKED)
                x += ROWS;
            else
                ++x0, ++x1;
        }
    }
    if (tile.last)
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
            store_columns<COLUMNS>(acc[r.value], out + r.value * out_stride, tile.width, tile.bias);
        });
    else
        unrolled<ROWS * COLUMNS>([&](auto i) __attribute__((always_inline)) {
            store(sums + i.value * LANES, acc[i.value / COLUMNS][i.value % COLUMNS]);
        });
}

// x [ROWS][stride] -> out [depth][ROWS]
template <int ROWS>
void pack(const float* x, int64_t stride, int64_t depth, float* out) {
    static_assert(ROWS <= LANES, "rows are transposed in one go");
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES, out += LANES * ROWS) {
        Vec v[LANES];
        for (int r = 0; r < LANES; ++r) v[r] = r < ROWS ? load(x + r * stride + k) : zero();
        transpose(v);
        for (int i = 0; i < LANES; ++i) put(out + i * ROWS, v[i], ROWS);
    }
    for (; k < depth; ++k, out += ROWS)
        for (int r = 0; r < ROWS; ++r) out[r] = x[r * stride + k];
}

// What is compiled for each number of rows.
struct Block {
    void (*multiply)(const Tile&, const float*, int64_t, float*, float*, int64_t);
    void (*multiply_packed)(const Tile&, const float*, int64_t, float*, float*, int64_t);
    void (*pack)(const float*, int64_t, int64_t, float*);
};
template <int... R>
struct BlocksOf {
    static constexpr Block table[] = {{}, {multiply<R, false>, multiply<R, true>, pack<R>}...};
};
#if defined(__AVX512F__)
using BlockOf = BlocksOf<1, 2, 3, 4, 5, 6, 7, 8, 9>;
#elif defined(__AVX2__) && defined(__FMA__)
using BlockOf = BlocksOf<1, 2, 3, 4, 5, 6>;
#else
using BlockOf = BlocksOf<1, 2>;
#endif

// The elements along k are divided evenly among tiles of at most DEPTH.
inline int64_t depth_of_tiles(int64_t inner) {
    return ceil_div(ceil_div(inner, ceil_div(inner, DEPTH)), BLOCK) * BLOCK;
}

// Rows of x in blocks of at most TILE_ROWS, as even as can be; `packed` [tiles along k][count][depth][rows of a block]
// where there are enough of them to be worth it, or null.
struct Rows {
    const float *x, *packed;
    int64_t rows, inner, count, depth;

    int64_t start(int64_t block) const { return rows * block / count; }
    int64_t size(int64_t block) const { return start(block + 1) - start(block); }
    int64_t packed_at(int64_t k, int64_t block) const { return (k / depth * count + block) * depth * TILE_ROWS; }
};

// One tile of TILE_PANELS panels for the blocks [begin, end) of rows.
template <int F>
void tile_rows(const Rows& x, int64_t begin, int64_t end, const Segment& segment, int64_t panel, float* out,
               int64_t out_stride, const float* bias) {
    const int64_t inner = x.inner, panel_bytes = LAYOUTS[F].panel_bytes(inner), column = panel * PANEL;
    const int64_t count = least(TILE_PANELS, ceil_div(segment.outputs, PANEL) - panel);
    const int64_t width = segment.outputs - column;
    const uint8_t* panels = segment.panels + panel * panel_bytes;
    if (x.count == 1) {
        float* weights = (float*)scratch(0, FEW * TILE_WIDTH * sizeof(float));
        const Tile tile{weights,   inner,  width, true,        true, bias ? bias + column : nullptr,
                        expand<F>, panels, count, panel_bytes, inner};
        return BlockOf::table[x.rows].multiply(tile, x.x, inner, nullptr, out + column, out_stride);
    }
    float* weights = (float*)scratch(0, TILE_WIDTH * x.depth * sizeof(float));
    float* sums = (float*)scratch(1, TILE_WIDTH * TILE_ROWS * (end - begin) * sizeof(float));
    for (int64_t k = 0; k < inner; k += x.depth) {
        const int64_t left = least(x.depth, inner - k);
        for (int64_t p = 0; p < count; ++p)
            expand<F>(panels + p * panel_bytes, inner, k, ceil_div(left, BLOCK) * BLOCK, weights + p * PANEL);
        const Tile tile{weights, left, width, k == 0, k + x.depth >= inner, bias ? bias + column : nullptr,
                        nullptr, nullptr, 0, 0, 0};
        for (int64_t b = begin; b < end; ++b) {
            const Block& block = BlockOf::table[x.size(b)];
            float* sum = sums + (b - begin) * TILE_WIDTH * TILE_ROWS;
            float* to = out + x.start(b) * out_stride + column;
            if (x.packed)
                block.multiply_packed(tile, x.packed + x.packed_at(k, b), 0, sum, to, out_stride);
            else
                block.multiply(tile, x.x + x.start(b) * inner + k, inner, sum, to, out_stride);
        }
    }
}

struct Kernels {
    void (*direct)(const float*, int64_t, int64_t, const Segment&, int64_t, int64_t, float*, int64_t, const float*);
    void (*tile)(const Rows&, int64_t, int64_t, const Segment&, int64_t, float*, int64_t, const float*);
};
template <int... F>
struct ByFormat {
    static constexpr Kernels table[] = {{direct_panels<F>, tile_rows<F>}...};
};
using AllKernels = ByFormat<0, 1, 2, 3, 4, 5, 6, 7, 8, 9>;

// f(segment, begin, end, column) for the parts of [begin, end) that lie in each segment, which has ceil(outputs / unit)
// indices.
template <class F>
inline void split(const Plan& plan, int64_t unit, int64_t begin, int64_t end, const F& f) {
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

inline int64_t units(const Plan& plan, int64_t unit) {
    int64_t count = 0;
    for (int64_t s = 0; s < plan.num_segments; ++s) count += ceil_div(plan.segments[s].outputs, unit);
    return count;
}

void few_rows(const Plan& plan, const float* x, float* out, int64_t rows) {
    constexpr int64_t UNIT = PANEL * DIRECT_PANELS;
    const int64_t count = units(plan, UNIT);
    // A thread should go through neighbouring panels, which it prefetches.
    int64_t grain = least(count / (2 * num_threads()), 32);
    if (grain * plan.inner * UNIT * rows < LEAST_WORK) grain = 1 + LEAST_WORK / (plan.inner * UNIT * rows);
    parallel(count, grain, [&](int64_t begin, int64_t end) {
        split(plan, UNIT, begin, end, [&](const Segment& segment, int64_t from, int64_t to, int64_t column) {
            AllKernels::table[segment.format].direct(x, rows, plan.inner, segment, from * DIRECT_PANELS,
                                                     least(to * DIRECT_PANELS, ceil_div(segment.outputs, PANEL)),
                                                     out + column, plan.outputs,
                                                     plan.bias ? plan.bias + column : nullptr);
        });
    });
}

void pack_rows(const Rows& x, float* packed) {
    parallel(x.count, 1 + LEAST_WORK / (x.inner * TILE_ROWS), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b)
            for (int64_t k = 0; k < x.inner; k += x.depth)
                BlockOf::table[x.size(b)].pack(x.x + x.start(b) * x.inner + k, x.inner, least(x.depth, x.inner - k),
                                               packed + x.packed_at(k, b));
    });
}

void many_rows(const Plan& plan, const float* from, float* out, int64_t num_rows) {
    Rows x{from, nullptr, num_rows, plan.inner, ceil_div(num_rows, TILE_ROWS), depth_of_tiles(plan.inner)};
    if (x.count >= LEAST_PACKED) {
        float* packed = (float*)scratch(2, x.packed_at(ceil_div(x.inner, x.depth) * x.depth, 0) * sizeof(float));
        pack_rows(x, packed);
        x.packed = packed;
    }
    const int64_t tiles = units(plan, TILE_WIDTH), chunks = ceil_div(num_rows, CHUNK_ROWS);
    int64_t grain = 1 + LEAST_WORK / (plan.inner * TILE_WIDTH * num_rows);
    // Fine enough that a thread which the system holds up does not hold up the others.
    if (num_rows <= NEIGHBOURS && tiles / (8 * num_threads()) > grain) grain = tiles / (8 * num_threads());
    parallel(tiles * chunks, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t chunk = i / tiles, tile = i % tiles;
            const int64_t first = x.count * chunk / chunks, last = x.count * (chunk + 1) / chunks;
            split(plan, TILE_WIDTH, tile, tile + 1, [&](const Segment& segment, int64_t at, int64_t, int64_t column) {
                AllKernels::table[segment.format].tile(x, first, last, segment, at * TILE_PANELS, out + column,
                                                       plan.outputs, plan.bias ? plan.bias + column : nullptr);
            });
        }
    });
}

}  // namespace

void product(const void* plan_address, const float* x, float* out, int64_t rows) {
    const Plan& plan = *(const Plan*)plan_address;
    if (rows <= 0) return;
    if (rows <= MOST_DIRECT_ROWS) {
        few_rows(plan, x, out, rows);
    } else {
        const int64_t fit = MOST_PACKED / plan.inner, parts = ceil_div(rows, fit > CHUNK_ROWS ? fit : CHUNK_ROWS);
        for (int64_t i = 0; i < parts; ++i) {
            const int64_t begin = rows * i / parts, end = rows * (i + 1) / parts;
            many_rows(plan, x + begin * plan.inner, out + begin * plan.outputs, end - begin);
        }
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
