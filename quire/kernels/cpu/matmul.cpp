// Matmuls of float32 rows with packed weights: out = x @ w^T + bias. Every output element is summed over k from the
// first to the last, whatever the number of rows and wherever a row stands in them, so results never depend on the
// batch.
#include "float_matmul.h"
#include "grouped.h"

namespace quire {
namespace QUIRE_NS {
namespace {

// Elements along k that a tile of weights holds: in one block of rows, and for several. The latter leaves room for a
// block of x beside it in the first-level cache.
constexpr int64_t FEW = 64, DEPTH = 192;
constexpr int64_t LEAST_PACKED = 4;  // blocks of rows from which on x is packed
// Elements of x that are packed at a time: they should still be in the caches when they are read.
constexpr int64_t MOST_PACKED = 1 << 19;

// What will be read next from the place of step `j`, `PANELS` panels further on, once per cache line. The hardware does
// not see that panels are read side by side; this was measured to take a third off the time of one row.
template <int F, int PANELS>
inline void prefetch(const uint8_t* codes, int64_t panel_stride, int j) {
    constexpr int STEPS = STEP_BYTES<F> < 64 ? 64 / STEP_BYTES<F> : 1;  // in a line
    if (j / LAYOUTS[F].step % STEPS != 0) return;
    for (int p = 0; p < PANELS; ++p) fetch(codes + (PANELS + p) * panel_stride);
}

// Elements [from, from + depth) along k of one panel as float32 [depth][PANEL], TILE_WIDTH apart; both are multiples of
// BLOCK.
template <int F>
void expand(const uint8_t* panel, int64_t inner, int64_t from, int64_t depth, float* out) {
    constexpr Layout L = LAYOUTS[F];
    const int64_t ahead = TILE_PANELS * L.panel_bytes(inner);
    const uint8_t* code_at = panel + L.codes_at(inner) + from / L.step * STEP_BYTES<F>;
    for (int64_t k = from; k < from + depth; k += L.group) {
        Scales<F> scales;
        scales.load_group(panel, k);
        Scales<F>::prefetch(panel, k, ahead);
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
    const uint8_t* code_at = panel + L.codes_at(inner);
    int64_t k = 0;
    for (; k + L.group <= inner; k += L.group) {
        Scales<F> scales[PANELS];
        for (int p = 0; p < PANELS; ++p) scales[p].load_group(panel + p * panel_stride, k);
        for (int p = 0; p < PANELS; ++p) Scales<F>::prefetch(panel, k, (PANELS + p) * panel_stride);
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
void few(const float* x, int64_t rows, int64_t inner, const Segment& segment, int64_t begin, int64_t end, float* out,
         int64_t stride, const float* bias) {
    with_rows<MOST_DIRECT_ROWS>(rows, [&](auto count) {
        direct_panels<F>(inner, segment, begin, end,
                         [&](const uint8_t* panel, int64_t apart, int64_t column, int64_t width) {
                             direct<F, decltype(count)::value>(x, inner, panel, apart, out + column, stride, width,
                                                               bias ? bias + column : nullptr);
                         });
    });
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
    constexpr int COLUMNS = TILE_VECS;
    Vec acc[ROWS][COLUMNS];
    if (tile.first)
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < COLUMNS; ++v) acc[r][v] = zero();
    else
        unrolled<ROWS * COLUMNS>([&](auto i) __attribute__((always_inline)) {
            acc[i.value / COLUMNS][i.value % COLUMNS] = load(sums + i.value * LANES);
        });
    if (PACKED && tile.last) prefetch_results<ROWS>(out, out_stride);
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

template <int ROWS>
struct Unpacked {
    static constexpr auto run = multiply<ROWS, false>;
};
template <int ROWS>
struct Packed {
    static constexpr auto run = multiply<ROWS, true>;
};
template <int ROWS>
struct Pack {
    static constexpr auto run = pack<ROWS>;
};

// `packed` [tiles along k][count][depth][rows of a block] where there are enough blocks to be worth it, or null.
struct Rows : Blocks {
    const float *x, *packed;

    Rows(const float* x, int64_t rows, int64_t inner) : Blocks(rows, inner, DEPTH), x(x), packed(nullptr) {}
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
        return Table<Unpacked>::of(x.rows)(tile, x.x, inner, nullptr, out + column, out_stride);
    }
    float* weights = (float*)scratch(0, TILE_WIDTH * x.depth * sizeof(float));
    float* sums = (float*)scratch(1, TILE_WIDTH * TILE_ROWS * (end - begin) * sizeof(float));
    for (int64_t k = 0; k < inner; k += x.depth) {
        const int64_t left = x.deep(k);
        for (int64_t p = 0; p < count; ++p)
            expand<F>(panels + p * panel_bytes, inner, k, ceil_div(left, BLOCK) * BLOCK, weights + p * PANEL);
        const Tile tile{weights, left, width, k == 0, k + x.depth >= inner, bias ? bias + column : nullptr,
                        nullptr, nullptr, 0, 0, 0};
        for (int64_t b = begin; b < end; ++b) {
            float* sum = sums + (b - begin) * TILE_WIDTH * TILE_ROWS;
            float* to = out + x.start(b) * out_stride + column;
            if (x.packed)
                Table<Packed>::of(x.size(b))(tile, x.packed + x.packed_at(k, b), 0, sum, to, out_stride);
            else
                Table<Unpacked>::of(x.size(b))(tile, x.x + x.start(b) * inner + k, inner, sum, to, out_stride);
        }
    }
}

struct Kernels {
    void (*direct)(const float*, int64_t, int64_t, const Segment&, int64_t, int64_t, float*, int64_t, const float*);
    void (*tile)(const Rows&, int64_t, int64_t, const Segment&, int64_t, float*, int64_t, const float*);
};
template <int... F>
struct ByFormat {
    static constexpr Kernels table[] = {{few<F>, tile_rows<F>}...};
};
using AllKernels = ByFormat<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20>;
static_assert(sizeof AllKernels::table / sizeof *AllKernels::table == NUM_FORMATS, "every format has kernels");

void few_rows(const Plan& plan, const float* x, float* out, int64_t rows) {
    share_panels(plan, rows, [&](const Segment& segment, int64_t begin, int64_t end, int64_t column) {
        AllKernels::table[segment.format].direct(x, rows, plan.inner, segment, begin, end, out + column, plan.outputs,
                                                 plan.bias_at(column));
    });
}

void many_rows(const Plan& plan, const float* from, float* out, int64_t num_rows) {
    Rows x(from, num_rows, plan.inner);
    if (x.count >= LEAST_PACKED) {
        float* packed = (float*)scratch(2, x.packed_at(x.tiles() * x.depth, 0) * sizeof(float));
        share_blocks(x, [&](int64_t block, int64_t k, int64_t depth) {
            Table<Pack>::of(x.size(block))(from + x.start(block) * x.inner + k, x.inner, depth,
                                           packed + x.packed_at(k, block));
        });
        x.packed = packed;
    }
    share_tiles(plan, x, [&](const Segment& segment, int64_t panel, int64_t first, int64_t last, int64_t column) {
        AllKernels::table[segment.format].tile(x, first, last, segment, panel, out + column, plan.outputs,
                                               plan.bias_at(column));
    });
}

void multiply_all(const Plan& plan, const float* x, float* out, int64_t rows) {
    const bool floats = is_float(plan);
    multiply_rows(
        plan, x, out, rows, MOST_DIRECT_ROWS, MOST_PACKED, [&](auto... part) { few_rows(plan, part...); },
        [&](auto... part) { floats ? float_rows(plan, part...) : many_rows(plan, part...); });
}

// Rows of several experts, sorted: x [rows, inner] -> out [rows, outputs].
void grouped_rows(const Grouping& rows, const float* x, float* out) {
    const int64_t inner = rows.buckets[0].plan->inner, outputs = rows.buckets[0].plan->outputs;
    constexpr int64_t MOST_AT_ONCE = (LEAST_PACKED - 1) * TILE_ROWS;  // rows of an expert that are not packed
    share_buckets(
        rows, PANEL * DIRECT_PANELS, [](const Bucket& bucket) { return bucket.count <= MOST_DIRECT_ROWS; },
        [&](const Bucket& bucket, const Segment& segment, int64_t from, int64_t to, int64_t column) {
            AllKernels::table[segment.format].direct(
                x + bucket.start * inner, bucket.count, inner, segment, from * DIRECT_PANELS,
                least(to * DIRECT_PANELS, ceil_div(segment.outputs, PANEL)), out + bucket.start * outputs + column,
                outputs, bucket.plan->bias_at(column));
        });
    share_buckets(
        rows, TILE_WIDTH,
        [](const Bucket& bucket) { return bucket.count > MOST_DIRECT_ROWS && bucket.count <= MOST_AT_ONCE; },
        [&](const Bucket& bucket, const Segment& segment, int64_t from, int64_t to, int64_t column) {
            const Rows part(x + bucket.start * inner, bucket.count, inner);
            for (int64_t tile = from; tile < to; ++tile)
                AllKernels::table[segment.format].tile(part, 0, part.count, segment, tile * TILE_PANELS,
                                                       out + bucket.start * outputs + column, outputs,
                                                       bucket.plan->bias_at(column));
        });
    for (int64_t b = 0; b < rows.num_buckets; ++b) {
        const Bucket& bucket = rows.buckets[b];
        if (bucket.count > MOST_DIRECT_ROWS && bucket.count > MOST_AT_ONCE)
            multiply_all(*bucket.plan, x + bucket.start * inner, out + bucket.start * outputs, bucket.count);
    }
}

}  // namespace

void grouped_gate_up(const void* plans, const float* x, const int32_t* ids, float* out, int64_t tokens, int64_t k,
                     int64_t experts, int activation) {
    run_gate_up(plans, x, ids, out, tokens, k, experts, activation, grouped_rows);
}

void grouped_down(const void* plans, const float* a, const int32_t* ids, const float* weights, float* out,
                  int64_t tokens, int64_t k, int64_t experts) {
    run_down(plans, a, ids, weights, out, tokens, k, experts, grouped_rows);
}

void matmul(const void* plan_address, const float* x, float* out, int64_t rows) {
    const Plan& plan = *(const Plan*)plan_address;
    multiply_all(plan, in_order(plan, x, rows), out, rows);
}

}  // namespace QUIRE_NS
}  // namespace quire
