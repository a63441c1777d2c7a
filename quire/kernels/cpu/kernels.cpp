// Quire's CPU kernels in float32: products, paged attention and the small ops between them.
//
// A plain C interface over raw pointers; no Python and no torch. Every output element is summed in one fixed order,
// whatever the number of rows and wherever a row stands in them, so results never depend on the batch.
#include <vector>

#include "pool.h"
#include "simd.h"

using namespace quire;

namespace {

// ------------------------------------------------------------------------------------------------------ products
// An output is the dot product of a row of x and a row of the weight: LANES partial sums over k, k + LANES, ..., added
// by `sum`. Tiles of ROWS x OUTS share loads; they do not change the order of any sum.
template <int ROWS, int OUTS>
inline void tile(const float* x, int64_t x_stride, const float* w, int64_t inner, const float* bias, float* out,
                 int64_t out_stride) {
    Vec acc[ROWS][OUTS];
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUTS; ++o) acc[r][o] = zero();
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES) {
        Vec xs[ROWS];
        for (int r = 0; r < ROWS; ++r) xs[r] = load(x + r * x_stride + k);
        for (int o = 0; o < OUTS; ++o) {
            const Vec weight = load(w + o * inner + k);
            for (int r = 0; r < ROWS; ++r) acc[r][o] = fma(xs[r], weight, acc[r][o]);
        }
    }
    if (k < inner) {
        const int rest = (int)(inner - k);
        for (int o = 0; o < OUTS; ++o) {
            const Vec weight = load_part(w + o * inner + k, rest);
            for (int r = 0; r < ROWS; ++r) acc[r][o] = fma(load_part(x + r * x_stride + k, rest), weight, acc[r][o]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUTS; ++o) out[r * out_stride + o] = sum(acc[r][o]) + (bias ? bias[o] : 0.0f);
}

template <int OUTS>
inline void tile_rows(const float* x, int64_t rows, const float* w, int64_t inner, const float* bias, float* out,
                      int64_t n) {
    int64_t r = 0;
    for (; r + ROW_TILE <= rows; r += ROW_TILE)
        tile<ROW_TILE, OUTS>(x + r * inner, inner, w, inner, bias, out + r * n, n);
    for (; r + 2 <= rows; r += 2) tile<2, OUTS>(x + r * inner, inner, w, inner, bias, out + r * n, n);
    if (r < rows) tile<1, OUTS>(x + r * inner, inner, w, inner, bias, out + r * n, n);
}

void outputs(const float* x, int64_t rows, const float* w, int64_t inner, const float* bias, float* out, int64_t n,
             int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + OUT_TILE <= end; o += OUT_TILE)
        tile_rows<OUT_TILE>(x, rows, w + o * inner, inner, bias ? bias + o : nullptr, out + o, n);
    for (; o < end; ++o) tile_rows<1>(x, rows, w + o * inner, inner, bias ? bias + o : nullptr, out + o, n);
}

// ----------------------------------------------------------------------------------------------------- small ops
inline float square_sum(const float* x, int64_t width) {
    Vec acc = zero();
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Vec v = load(x + i);
        acc = fma(v, v, acc);
    }
    if (i < width) {
        const Vec v = load_part(x + i, (int)(width - i));
        acc = fma(v, v, acc);
    }
    return sum(acc);
}

// f(vector) -> vector over [0, width), the rest through a padded vector, so that each element is treated alike.
template <class F>
inline void map(int64_t width, F f) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) f(i, LANES);
    if (i < width) f(i, (int)(width - i));
}

inline Vec get(const float* p, int n) { return n == LANES ? load(p) : load_part(p, n); }
inline void put(float* p, Vec v, int n) { n == LANES ? store(p, v) : store_part(p, v, n); }

void norm_row(const float* x, const float* weight, float offset, float eps, int64_t width, float* out) {
    const Vec scale = set(1.0f / std::sqrt(square_sum(x, width) / (float)width + eps)), shift = set(offset);
    map(width, [&](int64_t i, int n) { put(out + i, mul(mul(get(x + i, n), scale), add(get(weight + i, n), shift)), n); });
}

// ----------------------------------------------------------------------------------------------------- attention
struct Attention {
    const float* q;           // [tokens, heads, dim]
    const float* cache;       // [2, blocks, kv_heads, block_size, dim]
    const int32_t* tables;    // [max_rows, table_stride]
    const int64_t* rows;      // [num_rows] line of `tables`
    const int32_t* contexts;  // [num_rows] KV length after the step
    const int32_t* starts;    // [num_rows + 1] first token of each row
    float* out;               // [tokens, heads, dim]
    int64_t table_stride, value_offset, heads, kv_heads, dim, block_size, window;
    float scale, soft_cap;

    const float* key(const int32_t* table, int64_t kv_head, int64_t position) const {
        const int64_t block = table[position / block_size];
        return cache + ((block * kv_heads + kv_head) * block_size + position % block_size) * dim;
    }
};

inline float dot(const float* a, const float* b, int64_t n) {
    Vec acc = zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) acc = fma(load(a + i), load(b + i), acc);
    if (i < n) acc = fma(load_part(a + i, (int)(n - i)), load_part(b + i, (int)(n - i)), acc);
    return sum(acc);
}

// One query head over its keys, in order of position. What a query gives depends on its own keys and nothing else.
void attend_head(const Attention& a, const float* q, const int32_t* table, int64_t kv_head, int64_t first,
                 int64_t context, float* scores, float* out) {
    const int64_t count = context - first;
    for (int64_t i = 0; i < count; ++i) scores[i] = dot(q, a.key(table, kv_head, first + i), a.dim) * a.scale;
    if (a.soft_cap > 0) {
        const Vec cap = set(a.soft_cap), twice = set(2 * a.soft_cap), factor = set(2 / a.soft_cap), one = set(1.0f);
        map(count, [&](int64_t i, int n) {
            put(scores + i, sub(cap, div(twice, add(quire::exp(mul(get(scores + i, n), factor)), one))), n);
        });
    }
    float highest = scores[0];
    for (int64_t i = 1; i < count; ++i) highest = scores[i] > highest ? scores[i] : highest;
    const Vec shift = set(highest);
    map(count, [&](int64_t i, int n) { put(scores + i, quire::exp(sub(get(scores + i, n), shift)), n); });
    float total = 0;
    for (int64_t i = 0; i < count; ++i) total += scores[i];
    constexpr int CHUNK = 4;  // vectors of the output kept in registers at a time
    for (int64_t d = 0; d < a.dim; d += CHUNK * LANES) {
        Vec acc[CHUNK];
        for (int c = 0; c < CHUNK; ++c) acc[c] = zero();
        const int64_t width = a.dim - d;
        for (int64_t i = 0; i < count; ++i) {
            const float* value = a.key(table, kv_head, first + i) + a.value_offset + d;
            const Vec weight = set(scores[i]);
            for (int c = 0; c < CHUNK; ++c) {
                const int64_t left = width - c * LANES;
                if (left <= 0) break;
                acc[c] = fma(weight, get(value + c * LANES, left >= LANES ? LANES : (int)left), acc[c]);
            }
        }
        const Vec inverse = set(1.0f / total);
        for (int c = 0; c < CHUNK; ++c) {
            const int64_t left = width - c * LANES;
            if (left <= 0) break;
            put(out + d + c * LANES, mul(acc[c], inverse), left >= LANES ? LANES : (int)left);
        }
    }
}

void attend_item(const Attention& a, int64_t row, int64_t token, int64_t kv_head, std::vector<float>& scores) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t context = a.contexts[row] - (a.starts[row + 1] - 1 - token);
    const int64_t first = a.window > 0 && context > a.window ? context - a.window : 0;
    if ((int64_t)scores.size() < context - first) scores.resize(context - first + 256);
    const int32_t* table = a.tables + a.rows[row] * a.table_stride;
    for (int64_t h = 0; h < group; ++h) {
        const int64_t at = (token * a.heads + kv_head * group + h) * a.dim;
        attend_head(a, a.q + at, table, kv_head, first, context, scores.data(), a.out + at);
    }
}

}  // namespace

extern "C" {

int quire_abi_version() { return 1; }
int quire_lanes() { return LANES; }
void quire_set_threads(int count) { Pool::instance().resize(count); }

// x [rows, inner] @ w [n, inner]^T + bias [n] -> out [rows, n]
void quire_linear(const float* x, const float* w, const float* bias, float* out, int64_t rows, int64_t n, int64_t inner) {
    // Rows in chunks whose x stays in the second-level cache while all weights pass by.
    int64_t chunk = (384 << 10) / (inner * (int64_t)sizeof(float)) / ROW_TILE * ROW_TILE;
    chunk = chunk < 8 * ROW_TILE ? 8 * ROW_TILE : chunk;
    const int64_t grain = OUT_TILE * (1 + (1 << 16) / (inner * OUT_TILE * (rows < 16 ? rows : 16)));
    Pool::instance().run(n, grain, [&](int64_t begin, int64_t end) {
        for (int64_t r = 0; r < rows; r += chunk) {
            const int64_t count = rows - r < chunk ? rows - r : chunk;
            outputs(x + r * inner, count, w, inner, bias, out + r * n, n, begin, end);
        }
    });
}

// total = x + residual (if there is one); out = norm(total) * (offset + weight)
void quire_add_rms_norm(const float* x, const float* residual, const float* weight, float* out, float* total,
                        int64_t rows, int64_t width, int64_t x_stride, float eps, float offset) {
    Pool::instance().run(rows, 1 + 65536 / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* source = x + r * x_stride;
            if (residual) {
                float* merged = total + r * width;
                map(width, [&](int64_t i, int n) {
                    put(merged + i, add(get(residual + r * width + i, n), get(source + i, n)), n);
                });
                source = merged;
            }
            norm_row(source, weight, offset, eps, width, out + r * width);
        }
    });
}

// x [rows, 2 * width] holds gate and then up; out = act(gate) * up
void quire_gated(const float* x, float* out, int64_t rows, int64_t width, int gelu) {
    const Vec one = set(1.0f), cubic = set(0.044715f), factor = set(gelu ? -1.5957691216f : -1.0f);
    Pool::instance().run(rows, 1 + 16384 / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float *gate = x + r * 2 * width, *up = gate + width;
            map(width, [&](int64_t i, int n) {
                const Vec g = get(gate + i, n);
                Vec inner = mul(g, factor);
                if (gelu) inner = mul(inner, fma(mul(g, g), cubic, one));
                put(out + r * width + i, mul(div(g, add(quire::exp(inner), one)), get(up + i, n)), n);
            });
        }
    });
}

// qkv [tokens, heads + 2 * kv_heads, dim]: norm and rotate query and key heads; queries to q, keys and values to the
// cache at their slots. cos, sin: [tokens, rotary], the sine's sign folded in. Tokens past `num_written` are padding.
void quire_prepare_qkv(const float* qkv, const float* q_weight, const float* k_weight, const float* cos,
                       const float* sin, const int64_t* slots, float* q, float* cache, int64_t tokens,
                       int64_t num_written, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                       int64_t block_size, int64_t value_offset, float eps, float offset) {
    const int64_t all = heads + 2 * kv_heads;
    Pool::instance().run(tokens, 1 + 32768 / (all * dim), [&](int64_t begin, int64_t end) {
        std::vector<float> line(dim), turned(dim);
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t h = 0; h < all; ++h) {
                const float* source = qkv + (t * all + h) * dim;
                if (h < heads + kv_heads) {
                    const float* weight = h < heads ? q_weight : k_weight;
                    if (weight) {
                        norm_row(source, weight, offset, eps, dim, line.data());
                        source = line.data();
                    }
                    if (rotary) {
                        const float *c = cos + t * rotary, *s = sin + t * rotary;
                        const int64_t half = rotary / 2;
                        for (int64_t i = 0; i < rotary; ++i)
                            turned[i] = source[i] * c[i] + source[i < half ? i + half : i - half] * s[i];
                        for (int64_t i = rotary; i < dim; ++i) turned[i] = source[i];
                        source = turned.data();
                    }
                }
                float* target;
                if (h < heads) {
                    target = q + (t * heads + h) * dim;
                } else if (t < num_written) {
                    const bool is_value = h >= heads + kv_heads;
                    const int64_t kv_head = h - heads - (is_value ? kv_heads : 0), slot = slots[t];
                    const int64_t cell = ((slot / block_size) * kv_heads + kv_head) * block_size + slot % block_size;
                    target = cache + cell * dim + (is_value ? value_offset : 0);
                } else {
                    continue;
                }
                std::memcpy(target, source, sizeof(float) * dim);
            }
        }
    });
}

void quire_attention(const float* q, const float* cache, const int32_t* tables, const int64_t* rows,
                     const int32_t* contexts, const int32_t* starts, float* out, int64_t num_rows,
                     int64_t table_stride, int64_t value_offset, int64_t heads, int64_t kv_heads, int64_t dim,
                     int64_t block_size, int64_t window, float scale, float soft_cap) {
    const Attention a{q,           cache,        tables, rows,     contexts, starts,     out,    table_stride,
                      value_offset, heads,        kv_heads, dim,     block_size, window, scale,  soft_cap};
    std::vector<int32_t> row_of;
    for (int64_t r = 0; r < num_rows; ++r) row_of.insert(row_of.end(), starts[r + 1] - starts[r], (int32_t)r);
    const int64_t items = (int64_t)row_of.size() * kv_heads;
    Pool::instance().run(items, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> scores;
        for (int64_t i = begin; i < end; ++i) attend_item(a, row_of[i / kv_heads], i / kv_heads, i % kv_heads, scores);
    });
}

}  // extern "C"
