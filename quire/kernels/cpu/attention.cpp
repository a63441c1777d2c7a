// Paged attention.
#include <vector>

#include "norm.h"

namespace quire {
namespace QUIRE_NS {
namespace {

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
            put(scores + i, sub(cap, div(twice, add(exp(mul(get(scores + i, n), factor)), one))), n);
        });
    }
    float highest = scores[0];
    for (int64_t i = 1; i < count; ++i) highest = scores[i] > highest ? scores[i] : highest;
    const Vec shift = set(highest);
    map(count, [&](int64_t i, int n) { put(scores + i, exp(sub(get(scores + i, n), shift)), n); });
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

void prepare_qkv(const float* qkv, const float* q_weight, const float* k_weight, const float* cos,
                       const float* sin, const int64_t* slots, float* q, float* cache, int64_t tokens,
                       int64_t num_written, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                       int64_t block_size, int64_t value_offset, float eps, float offset) {
    const int64_t all = heads + 2 * kv_heads;
    parallel(tokens, 1 + 32768 / (all * dim), [&](int64_t begin, int64_t end) {
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

void attention(const float* q, const float* cache, const int32_t* tables, const int64_t* rows,
                     const int32_t* contexts, const int32_t* starts, float* out, int64_t num_rows,
                     int64_t table_stride, int64_t value_offset, int64_t heads, int64_t kv_heads, int64_t dim,
                     int64_t block_size, int64_t window, float scale, float soft_cap) {
    const Attention a{q,           cache,        tables, rows,     contexts, starts,     out,    table_stride,
                      value_offset, heads,        kv_heads, dim,     block_size, window, scale,  soft_cap};
    std::vector<int32_t> row_of;
    for (int64_t r = 0; r < num_rows; ++r) row_of.insert(row_of.end(), starts[r + 1] - starts[r], (int32_t)r);
    const int64_t items = (int64_t)row_of.size() * kv_heads;
    parallel(items, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> scores;
        for (int64_t i = begin; i < end; ++i) attend_item(a, row_of[i / kv_heads], i / kv_heads, i % kv_heads, scores);
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
