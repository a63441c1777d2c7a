// Matmuls with float32 panels, which are read where they lie instead of being copied into tiles: a block of rows of x,
// packed side by side, passes by one panel, and a register holds the sum of each row. Sums are over k from the first to
// the last, as in matmul.cpp, so results depend neither on the batch nor on which of the two made them.
#pragma once
#include "plan.h"

namespace quire {
namespace QUIRE_NS {

#if defined(__AVX512F__)
constexpr int FLOAT_ROWS = 24;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int FLOAT_ROWS = 6;
#else
constexpr int FLOAT_ROWS = 2;
#endif
constexpr int64_t FLOAT_DEPTH = 384;  // elements along k of a panel that stay in the first-level cache: 24 KB
constexpr int64_t LEAST_SHARED = 4;   // blocks of rows from which on threads share the packing of x

// A piece of a panel, `depth` elements along k, and what becomes of its sums.
struct FloatPiece {
    const float* weights;  // [depth][PANEL]
    int64_t depth, next;   // floats to the panel that is multiplied by next; 0: it is in the caches already
    bool first, last;      // along k: starts from zero, ends in `out`; others hand over sums
    const float* bias;
    int64_t width;
};

// x [depth][ROWS], sums [ROWS][PANEL].
template <int ROWS>
struct FloatTile {
    template <bool FETCH>
    static inline __attribute__((always_inline)) void add_up(const FloatPiece& piece, const float* x, Vec (*acc)[VECS]) {
        const float *w = piece.weights, *end = w + piece.depth * PANEL;
        for (; w != end; w += PANEL, x += ROWS) {
            Vec ws[VECS];
            for (int v = 0; v < VECS; ++v) ws[v] = load(w + v * LANES);
            if (FETCH) fetch(w + piece.next);
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
                const Vec xs = set(x[r.value]);
                for (int v = 0; v < VECS; ++v) acc[r.value][v] = fma(xs, ws[v], acc[r.value][v]);
            });
        }
    }

    static void run(const FloatPiece& piece, const float* x, float* sums, float* out, int64_t stride) {
        Vec acc[ROWS][VECS];
        unrolled<ROWS * VECS>([&](auto i) __attribute__((always_inline)) {
            acc[i.value / VECS][i.value % VECS] = piece.first ? zero() : load(sums + i.value * LANES);
        });
        if (piece.last)
            for (int r = 0; r < ROWS; ++r) __builtin_prefetch(out + r * stride, 1);
        if (piece.next)
            add_up<true>(piece, x, acc);
        else
            add_up<false>(piece, x, acc);
        if (piece.last)
            unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
                store_columns<VECS>(acc[r.value], out + r.value * stride, piece.width, piece.bias);
            });
        else
            unrolled<ROWS * VECS>([&](auto i) __attribute__((always_inline)) {
                store(sums + i.value * LANES, acc[i.value / VECS][i.value % VECS]);
            });
    }
};

// Elements [k, k + depth) of the rows x [rows][stride] -> out [depth][rows]
static inline void pack_rows(const float* x, int64_t rows, int64_t stride, int64_t depth, float* out) {
    for (int64_t first = 0; first < rows; first += LANES) {
        const int64_t count = least(LANES, rows - first);
        const float* from = x + first * stride;
        int64_t k = 0;
        for (; k + LANES <= depth; k += LANES) {
            Vec v[LANES];
            for (int r = 0; r < LANES; ++r) v[r] = r < count ? load(from + r * stride + k) : zero();
            transpose(v);
            for (int i = 0; i < LANES; ++i) put(out + (k + i) * rows + first, v[i], (int)count);
        }
        for (; k < depth; ++k)
            for (int r = 0; r < count; ++r) out[k * rows + first + r] = from[r * stride + k];
    }
}

// out [rows, outputs] = x [rows, inner] times segments that are all float32.
static inline void float_rows(const Plan& plan, const float* from, float* out, int64_t num_rows) {
    const Blocks x(num_rows, plan.inner, FLOAT_DEPTH, FLOAT_ROWS);
    float* packed = (float*)scratch(2, num_rows * x.inner * sizeof(float));
    const auto pack_block = [&](int64_t block, int64_t k, int64_t depth) {
        pack_rows(from + x.start(block) * x.inner + k, x.size(block), x.inner, depth,
                  packed + x.start(block) * x.inner + k * x.size(block));
    };
    if (x.count >= LEAST_SHARED)
        share_blocks(x, pack_block);
    else
        for (int64_t block = 0; block < x.count; ++block) pack_block(block, 0, x.inner);
    share_tiles<1>(plan, x, [&](const Segment& segment, int64_t panel, int64_t first, int64_t last, int64_t column) {
        const int64_t size = LAYOUTS[FLOAT32].panel_bytes(x.inner) / (int64_t)sizeof(float);
        const int64_t at = panel * PANEL, ahead = at + PANEL < segment.outputs ? size : 0;
        const float* weights = (const float*)segment.panels + panel * size;
        float* sums = (float*)scratch(1, (last - first) * FLOAT_ROWS * PANEL * sizeof(float));
        const float* bias = plan.bias_at(column);
        for (int64_t k = 0; k < x.inner; k += x.depth) {
            FloatPiece piece{weights + k * PANEL, x.deep(k), ahead, k == 0, k + x.depth >= x.inner,
                             bias ? bias + at : nullptr, segment.outputs - at};
            for (int64_t b = first; b < last; ++b, piece.next = 0)
                Table<FloatTile, 1, FLOAT_ROWS>::of(x.size(b))(
                    piece, packed + x.start(b) * x.inner + k * x.size(b), sums + (b - first) * FLOAT_ROWS * PANEL,
                    out + x.start(b) * plan.outputs + column + at, plan.outputs);
        }
    });
}

static inline bool is_float(const Plan& plan) {
    for (int64_t s = 0; s < plan.num_segments; ++s)
        if (plan.segments[s].format != FLOAT32) return false;
    return true;
}

}  // namespace QUIRE_NS
}  // namespace quire
