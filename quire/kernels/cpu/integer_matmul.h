// Matmuls of rows rounded to integers with weights of 4 or 8 bits: out = x @ w^T + bias. What one word holds of a row
// and of weights, and how words are multiplied, is what words16.h or words8.h says, of which a source includes one before.
//
// Each 32 elements of a row share a scale. A group's products are summed as integers, which is exact, and the groups'
// sums in floats from the first to the last, whatever the number of rows and wherever a row stands in them: results
// never depend on the batch, nor on the instruction set. Of a row that is not finite, all results are NaN.
#pragma once
#include "grouped.h"

// Not an unnamed namespace: g++ would merge the tables of functions of two sources that include this.
namespace quire {
namespace QUIRE_NS {
namespace QUIRE_WORDS {

constexpr int64_t MOST_ENCODED = 1 << 20;   // elements of x that are encoded at a time
constexpr int64_t LEAST_ENCODED = 1 << 13;  // and that are worth a thread's attention
constexpr int INT_WIDTH = INT_PANELS * PANEL, INT_VECS = INT_PANELS * VECS;
constexpr int MOST_ROWS = PASS_ROWS > INT_ROWS ? PASS_ROWS : INT_ROWS;  // that are encoded together

// ---- rows of x
template <int ROWS>
struct Encode {
    static constexpr auto run = encode<ROWS>;
};

constexpr int64_t block_words(int64_t rows) { return (HEADER + BLOCK / PER_WORD) * rows; }

// ---- weights
// Eight elements along k of one panel.
template <int F>
struct Eight {
    static constexpr int BYTES = PANEL * LAYOUTS[F].bits;
    const uint8_t* p;
    Words words[VECS];

    inline void load_codes(const uint8_t* from) {
        p = from;
        if constexpr (LAYOUTS[F].bits == 4)
            for (int v = 0; v < VECS; ++v) words[v] = load_words(from + v * LANES * 4);
    }
    static inline void prefetch(const uint8_t* from) {
        for (int line = 0; line < BYTES; line += 64) fetch(from + line);
    }
    // PER_WORD of them: those that a word of a row has in its place I.
    template <int I>
    inline Ints word(int v) const {
        if constexpr (LAYOUTS[F].table != NO_TABLE)
            return table_word(nibble_word<I>(words[v]));
        else if constexpr (LAYOUTS[F].bits == 4)
            return nibble_word<I>(words[v]);
        else
            return line_word<I>(p + v * LANES);
    }
};

// How the sum of a group becomes one over weights.
enum Kind { SCALE, SCALE_AND_MINIMUM, SCALE_AND_MINIMUM_OF_8_BITS, SCALE_OF_16 };
constexpr Kind kind_of(int format) {
    if (LAYOUTS[format].group < BLOCK) return SCALE_OF_16;
    if (!LAYOUTS[format].has_min && !LAYOUTS[format].zero) return SCALE;
    return BIASES && LAYOUTS[format].bits == 8 ? SCALE_AND_MINIMUM_OF_8_BITS : SCALE_AND_MINIMUM;
}
constexpr bool has_minimum(Kind kind) { return kind == SCALE_AND_MINIMUM || kind == SCALE_AND_MINIMUM_OF_8_BITS; }
constexpr bool is_biased(Kind kind) { return BIASES && kind != SCALE_AND_MINIMUM; }
constexpr int group_of(Kind kind) { return kind == SCALE_OF_16 ? 16 : BLOCK; }

// The scales of a group; a code that means zero makes a minimum.
template <int F>
inline Scales<F> scales_at(const uint8_t* panel, int64_t k) {
    static_assert(LAYOUTS[F].group == group_of(kind_of(F)), "a group of another size needs a kind of its own");
    Scales<F> scales;
    scales.load_group(panel, k);
    if constexpr (LAYOUTS[F].zero != 0)
        for (int v = 0; v < VECS; ++v) scales.minimum[v] = mul(scales.scale[v], set(-LAYOUTS[F].zero));
    return scales;
}

// What a group's sum of integers begins with; `starts`: a row's, after its scale and sum.
template <Kind K, int ROWS>
inline Ints first_total(const int32_t* starts, int g) {
    if constexpr (!is_biased(K)) return no_ints();
    const int32_t low = starts[0], high = starts[ROWS];
    return set_ints(group_of(K) == BLOCK ? low + high : g ? high : low);
}

// A group's sum over code * x as the sum over weight * x, in units of x's scale.
template <Kind K>
inline Vec scaled(Ints total, Vec scale, Vec minimum, Vec x_sum) {
    const Vec value = to_float(total);
    return has_minimum(K) ? fma(value, scale, mul(minimum, x_sum)) : mul(value, scale);
}

// ---- few rows: codes are made in registers and used at once
// DIRECT_PANELS panels, `panel_stride` bytes apart, of which `width` columns are wanted.
template <int F, int ROWS>
void direct(const int32_t* x, int64_t inner, const uint8_t* panel, int64_t panel_stride, float* out, int64_t stride,
            int64_t width, const float* bias) {
    constexpr Layout L = LAYOUTS[F];
    constexpr int PANELS = DIRECT_PANELS, N = PANELS * VECS;
    Vec acc[ROWS][N];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < N; ++v) acc[r][v] = zero();
    const uint8_t* code_at = panel + L.codes_at(inner);
    for (int64_t k = 0; k < inner; k += BLOCK) {
        const float *x_scales = (const float*)x, *x_sums = x_scales + ROWS;
        const int32_t* starts = x + 2 * ROWS;
        x += HEADER * ROWS;
        for (int g = 0; g < BLOCK; g += L.group) {
            Ints totals[ROWS][N];
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < N; ++v) totals[r][v] = first_total<kind_of(F), ROWS>(starts + r, g);
            for (int j = 0; j < L.group; j += 8, x += 8 / PER_WORD * ROWS, code_at += Eight<F>::BYTES) {
                Eight<F> codes[PANELS];
                for (int p = 0; p < PANELS; ++p) codes[p].load_codes(code_at + p * panel_stride);
                for (int p = 0; p < PANELS; ++p) Eight<F>::prefetch(code_at + (PANELS + p) * panel_stride);
                unrolled<8 / PER_WORD>([&](auto index) __attribute__((always_inline)) {
                    constexpr int I = decltype(index)::value;
                    Ints xs[ROWS];
                    for (int r = 0; r < ROWS; ++r) xs[r] = set_ints(x[I * ROWS + r]);
                    for (int p = 0; p < PANELS; ++p)
                        for (int v = 0; v < VECS; ++v) {
                            const Ints w = codes[p].template word<I>(v);
                            for (int r = 0; r < ROWS; ++r)
                                totals[r][p * VECS + v] = dot_words(totals[r][p * VECS + v], w, xs[r]);
                        }
                });
            }
            for (int p = 0; p < PANELS; ++p) {
                const Scales<F> scales = scales_at<F>(panel + p * panel_stride, k + g);
                Scales<F>::prefetch(panel, k + g, (PANELS + p) * panel_stride);
                for (int v = 0; v < VECS; ++v)
                    for (int r = 0; r < ROWS; ++r) {
                        const Vec value = scaled<kind_of(F)>(totals[r][p * VECS + v], scales.scale[v],
                                                             scales.minimum[v], set(x_sums[r]));
                        acc[r][p * VECS + v] = fma(value, set(x_scales[r]), acc[r][p * VECS + v]);
                    }
            }
        }
    }
    unrolled<ROWS>([&](auto r) { store_columns<N>(acc[r.value], out + r.value * stride, width, bias); });
}

// Rows in passes, nearly as many in each; `at`: where what `encode` makes of them begins.
struct Passes {
    int64_t rows, count, row_words;

    Passes(int64_t rows, int64_t inner)
        : rows(rows), count(ceil_div(rows, PASS_ROWS)), row_words(ceil_div(inner, BLOCK) * block_words(1)) {}
    int64_t start(int64_t pass) const { return rows * pass / count; }
    int64_t size(int64_t pass) const { return start(pass + 1) - start(pass); }
    int64_t at(int64_t pass) const { return start(pass) * row_words; }
};

// Panels [begin, end) of a segment: all rows pass by a few of them while they are in the first-level cache.
template <int F>
void few(const int32_t* x, int64_t rows, int64_t inner, const Segment& segment, int64_t begin, int64_t end, float* out,
         int64_t stride, const float* bias) {
    const Passes passes(rows, inner);
    direct_panels<F>(inner, segment, begin, end, [&](const uint8_t* panel, int64_t apart, int64_t column, int64_t width) {
        for (int64_t i = 0; i < passes.count; ++i)
            with_rows<PASS_ROWS>(passes.size(i), [&](auto count) {
                direct<F, decltype(count)::value>(x + passes.at(i), inner, panel, apart,
                                                  out + passes.start(i) * stride + column, stride, width,
                                                  bias ? bias + column : nullptr);
            });
    });
}

// ---- many rows: codes are made once per tile, which all rows of a chunk pass by
struct Tile {
    const int32_t* codes;  // [words along k][INT_WIDTH]
    const float* scales;   // [groups along k][2][INT_WIDTH]: scales and minima
    int64_t blocks, width;
    bool first, last;   // of the tiles along k: starts from zero, ends in `out`; others hand over sums
    const float* bias;  // added by the last
};

// Elements [from, from + depth) along k of one panel, both multiples of BLOCK.
template <int F>
void expand(const uint8_t* panel, int64_t inner, int64_t from, int64_t depth, int32_t* codes, float* scales) {
    constexpr Layout L = LAYOUTS[F];
    const int64_t ahead = INT_PANELS * L.panel_bytes(inner);
    const uint8_t* code_at = panel + L.codes_at(inner) + from / 8 * Eight<F>::BYTES;
    for (int64_t k = from; k < from + depth; k += L.group) {
        const Scales<F> group = scales_at<F>(panel, k);
        Scales<F>::prefetch(panel, k, ahead);
        for (int v = 0; v < VECS; ++v) {
            store(scales + v * LANES, group.scale[v]);
            if constexpr (has_minimum(kind_of(F))) store(scales + INT_WIDTH + v * LANES, group.minimum[v]);
        }
        scales += 2 * INT_WIDTH;
        for (int j = 0; j < L.group; j += 8, code_at += Eight<F>::BYTES) {
            Eight<F> eight;
            eight.load_codes(code_at);
            Eight<F>::prefetch(code_at + ahead);
            unrolled<8 / PER_WORD>([&](auto index) __attribute__((always_inline)) {
                for (int v = 0; v < VECS; ++v)
                    store_ints(codes + v * LANES, eight.template word<decltype(index)::value>(v));
                codes += INT_WIDTH;
            });
        }
    }
}

// The sums of a tile stay in registers where all fit, with the group's sums of integers: through memory, adding these takes
// as long as a third of the dot products. AVX2 has too few registers: a tile that fits would load each word too often.
template <int ROWS>
struct Sums {
    Vec held[SUMS_IN_REGISTERS ? ROWS * INT_VECS : 1];
    float* memory;  // [ROWS][INT_WIDTH]

    inline __attribute__((always_inline)) Vec at(int i) const {
        return SUMS_IN_REGISTERS ? held[i] : load(memory + i * LANES);
    }
    inline __attribute__((always_inline)) void put(int i, Vec v) {
        if constexpr (SUMS_IN_REGISTERS)
            held[i] = v;
        else
            store(memory + i * LANES, v);
    }
};

template <Kind K, int ROWS>
void multiply(const Tile& tile, const int32_t* x, float* handed, float* out, int64_t out_stride) {
    constexpr int GROUP = group_of(K), COUNT = ROWS * INT_VECS, WORDS = GROUP / PER_WORD;
    alignas(64) int32_t passed[SUMS_IN_REGISTERS ? 1 : COUNT * LANES];
    Sums<ROWS> sums;
    sums.memory = handed;
    if (SUMS_IN_REGISTERS || tile.first)
        unrolled<COUNT>([&](auto i) __attribute__((always_inline)) {
            sums.put(i.value, tile.first ? zero() : load(handed + i.value * LANES));
        });
    if (tile.last) prefetch_results<ROWS, INT_PANELS>(out, out_stride);
    const int32_t* w = tile.codes;
    const float* scales = tile.scales;
    for (int64_t block = 0; block < tile.blocks; ++block) {
        const float *x_scales = (const float*)x, *x_sums = x_scales + ROWS;
        const int32_t* starts = x + 2 * ROWS;
        x += HEADER * ROWS;
        for (int g = 0; g < BLOCK; g += GROUP, scales += 2 * INT_WIDTH) {
            Ints totals[ROWS][INT_VECS];
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < INT_VECS; ++v) totals[r][v] = first_total<K, ROWS>(starts + r, g);
            for (int j = 0; j < WORDS; ++j, w += INT_WIDTH, x += ROWS) {
                Ints ws[INT_VECS];
                for (int v = 0; v < INT_VECS; ++v) ws[v] = load_ints(w + v * LANES);
                for (int r = 0; r < ROWS; ++r) {
                    const Ints xs = set_ints(x[r]);
                    for (int v = 0; v < INT_VECS; ++v) totals[r][v] = dot_words(totals[r][v], ws[v], xs);
                }
            }
            if constexpr (!SUMS_IN_REGISTERS) {
                unrolled<COUNT>([&](auto i) __attribute__((always_inline)) {
                    store_ints(passed + i.value * LANES, totals[i.value / INT_VECS][i.value % INT_VECS]);
                });
                asm volatile("" : : "r"(passed) : "memory");  // or g++ would keep them in registers, and scales in none
            }
            Vec scale[INT_VECS], minimum[INT_VECS];
            for (int v = 0; v < INT_VECS; ++v) {
                scale[v] = load(scales + v * LANES);
                minimum[v] = has_minimum(K) ? load(scales + INT_WIDTH + v * LANES) : zero();
            }
            unrolled<COUNT>([&](auto i) __attribute__((always_inline)) {
                constexpr int R = decltype(i)::value / INT_VECS, V = decltype(i)::value % INT_VECS;
                const Ints total = SUMS_IN_REGISTERS ? totals[R][V] : load_ints(passed + i.value * LANES);
                const Vec value = scaled<K>(total, scale[V], minimum[V], set(x_sums[R]));
                sums.put(i.value, fma(value, set(x_scales[R]), sums.at(i.value)));
            });
        }
    }
    if (tile.last)
        unrolled<ROWS>([&](auto r) __attribute__((always_inline)) {
            Vec v[INT_VECS];
            for (int i = 0; i < INT_VECS; ++i) v[i] = sums.at(r.value * INT_VECS + i);
            store_columns<INT_VECS>(v, out + r.value * out_stride, tile.width, tile.bias);
        });
    else if (SUMS_IN_REGISTERS)
        unrolled<COUNT>([&](auto i) __attribute__((always_inline)) { store(handed + i.value * LANES, sums.at(i.value)); });
}
template <Kind K>
struct Of {
    template <int ROWS>
    struct Multiply {
        static constexpr auto run = multiply<K, ROWS>;
    };
};

struct Rows : Blocks {
    const int32_t* codes;  // [tiles along k][count] of what `encode` makes

    Rows(int64_t rows, int64_t inner) : Blocks(rows, inner, DEPTH, INT_ROWS), codes(nullptr) {}
    int64_t at(int64_t k, int64_t block) const {
        return (k / depth * count + block) * (depth / BLOCK) * block_words(INT_ROWS);
    }
};

// One tile of INT_PANELS panels for the blocks [begin, end) of rows.
template <int F>
void tile_rows(const Rows& x, int64_t begin, int64_t end, const Segment& segment, int64_t panel, float* out,
               int64_t out_stride, const float* bias) {
    const int64_t panel_bytes = LAYOUTS[F].panel_bytes(x.inner), column = panel * PANEL;
    const int64_t count = least(INT_PANELS, ceil_div(segment.outputs, PANEL) - panel);
    const uint8_t* panels = segment.panels + panel * panel_bytes;
    int32_t* codes = (int32_t*)scratch(0, INT_WIDTH * x.depth / PER_WORD * sizeof(int32_t));
    float* sums = (float*)scratch(1, INT_WIDTH * INT_ROWS * (end - begin) * sizeof(float));
    float* scales = (float*)scratch(3, x.depth / LAYOUTS[F].group * 2 * INT_WIDTH * sizeof(float));
    for (int64_t k = 0; k < x.inner; k += x.depth) {
        const int64_t blocks = ceil_div(x.deep(k), BLOCK);
        for (int64_t p = 0; p < count; ++p)
            expand<F>(panels + p * panel_bytes, x.inner, k, blocks * BLOCK, codes + p * PANEL, scales + p * PANEL);
        const Tile tile{codes,  scales,  blocks, segment.outputs - column, k == 0, k + x.depth >= x.inner,
                        bias ? bias + column : nullptr};
        for (int64_t b = begin; b < end; ++b)
            Table<Of<kind_of(F)>::template Multiply, 1, INT_ROWS>::of(x.size(b))(tile, x.codes + x.at(k, b),
                                                           sums + (b - begin) * INT_WIDTH * INT_ROWS,
                                                           out + x.start(b) * out_stride + column, out_stride);
    }
}

struct Kernels {
    void (*direct)(const int32_t*, int64_t, int64_t, const Segment&, int64_t, int64_t, float*, int64_t, const float*);
    void (*tile)(const Rows&, int64_t, int64_t, const Segment&, int64_t, float*, int64_t, const float*);
};
template <int... F>
struct ByFormat {
    static constexpr Kernels table[] = {{few<F>, tile_rows<F>}...};
};
using AllKernels = ByFormat<CODE4, CODE4_MIN, CODE4_MIN_F32, CODE8, CODE8_MIN, CODE8_MIN_F32, CODE8_F32, E2M1, E2M1_16,
                            CODE4_MIN_K, CODE8_MIN_K, CODE8_K, CODE8_32>;
inline const Kernels& kernels_of(const Segment& segment) {
    const int64_t format = segment.format;
    const int64_t others = format < CODE4_MIN_16 ? 0 : format < NF4 ? 1 : 5;  // before it, that are not in the table
    return AllKernels::table[format - CODE4 - others];
}

inline void few_rows(const Plan& plan, const float* x, float* out, int64_t rows) {
    const Passes passes(rows, plan.inner);
    int32_t* codes = (int32_t*)scratch(2, rows * passes.row_words * sizeof(int32_t));
    parallel(passes.count, 1 + LEAST_ENCODED / (plan.inner * PASS_ROWS), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            Table<Encode, 1, MOST_ROWS>::of(passes.size(i))(x + passes.start(i) * plan.inner, plan.inner, plan.inner,
                                                 codes + passes.at(i));
    });
    share_panels(plan, rows, [&](const Segment& segment, int64_t begin, int64_t end, int64_t column) {
        kernels_of(segment).direct(codes, rows, plan.inner, segment, begin, end, out + column, plan.outputs,
                                   plan.bias_at(column));
    });
}

inline void many_rows(const Plan& plan, const float* from, float* out, int64_t num_rows) {
    Rows x(num_rows, plan.inner);
    int32_t* codes = (int32_t*)scratch(2, x.at(x.tiles() * x.depth, 0) * sizeof(int32_t));
    share_blocks(x, [&](int64_t block, int64_t k, int64_t depth) {
        Table<Encode, 1, MOST_ROWS>::of(x.size(block))(from + x.start(block) * x.inner + k, x.inner, depth, codes + x.at(k, block));
    });
    x.codes = codes;
    share_tiles<INT_PANELS>(plan, x, [&](const Segment& segment, int64_t panel, int64_t first, int64_t last, int64_t column) {
        kernels_of(segment).tile(x, first, last, segment, panel, out + column, plan.outputs, plan.bias_at(column));
    });
}

inline int64_t most_passed(const Plan& plan) {
    for (int64_t s = 0; s < plan.num_segments; ++s)
        if (LAYOUTS[plan.segments[s].format].bits == 8) return MOST_PASSED_8;
    return MOST_PASSED_4;
}

inline void multiply_all(const Plan& plan, const float* x, float* out, int64_t rows) {
    multiply_rows(
        plan, x, out, rows, most_passed(plan), MOST_ENCODED, [&](auto... part) { few_rows(plan, part...); },
        [&](auto... part) { many_rows(plan, part...); });
}

// Rows of several experts, sorted: x [rows, inner] -> out [rows, outputs].
inline void grouped_rows(const Grouping& rows, const float* x, float* out) {
    const int64_t inner = rows.buckets[0].plan->inner, outputs = rows.buckets[0].plan->outputs;
    const auto passes = [](const Bucket& bucket) { return bucket.count <= most_passed(*bucket.plan); };
    const auto tiles = [&](const Bucket& bucket) { return !passes(bucket) && bucket.count <= CHUNK_ROWS; };
    int64_t words = 0;
    for (int64_t b = 0; b < rows.num_buckets; ++b) {
        Bucket& bucket = rows.buckets[b];
        bucket.codes = words;
        const Rows blocks(bucket.count, inner);
        if (passes(bucket)) words += bucket.count * Passes(1, inner).row_words;
        if (tiles(bucket)) words += blocks.at(blocks.tiles() * blocks.depth, 0);
    }
    int32_t* codes = (int32_t*)scratch(7, words * sizeof(int32_t));
    parallel(rows.num_buckets, 1 + LEAST_ENCODED / (inner * ceil_div(rows.rows, rows.num_buckets)),
             [&](int64_t begin, int64_t end) {
                 for (int64_t b = begin; b < end; ++b) {
                     const Bucket& bucket = rows.buckets[b];
                     const float* from = x + bucket.start * inner;
                     const Passes few(bucket.count, inner);
                     const Rows many(bucket.count, inner);
                     for (int64_t i = 0; passes(bucket) && i < few.count; ++i)
                         Table<Encode, 1, MOST_ROWS>::of(few.size(i))(from + few.start(i) * inner, inner, inner,
                                                           codes + bucket.codes + few.at(i));
                     for (int64_t i = 0; tiles(bucket) && i < many.count; ++i)
                         for (int64_t k = 0; k < inner; k += many.depth)
                             Table<Encode, 1, MOST_ROWS>::of(many.size(i))(from + many.start(i) * inner + k, inner, many.deep(k),
                                                                codes + bucket.codes + many.at(k, i));
                 }
             });
    share_buckets(rows, PANEL * DIRECT_PANELS, passes,
                  [&](const Bucket& bucket, const Segment& segment, int64_t from, int64_t to, int64_t column) {
                      kernels_of(segment).direct(codes + bucket.codes, bucket.count, inner, segment, from * DIRECT_PANELS,
                                                 least(to * DIRECT_PANELS, ceil_div(segment.outputs, PANEL)),
                                                 out + bucket.start * outputs + column, outputs,
                                                 bucket.plan->bias_at(column));
                  });
    share_buckets(rows, INT_WIDTH, tiles,
                  [&](const Bucket& bucket, const Segment& segment, int64_t from, int64_t to, int64_t column) {
                      Rows part(bucket.count, inner);
                      part.codes = codes + bucket.codes;
                      for (int64_t tile = from; tile < to; ++tile)
                          kernels_of(segment).tile(part, 0, part.count, segment, tile * INT_PANELS,
                                                   out + bucket.start * outputs + column, outputs,
                                                   bucket.plan->bias_at(column));
                  });
    for (int64_t b = 0; b < rows.num_buckets; ++b) {
        const Bucket& bucket = rows.buckets[b];
        if (!passes(bucket) && !tiles(bucket))
            multiply_all(*bucket.plan, x + bucket.start * inner, out + bucket.start * outputs, bucket.count);
    }
}

}  // namespace QUIRE_WORDS
}  // namespace QUIRE_NS
}  // namespace quire
