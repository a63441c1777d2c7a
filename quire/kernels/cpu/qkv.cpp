// From projected qkv to attention's input: head norms and rotation, and keys and values into the cache.
#include "kv_cache.h"
#include "norm.h"

namespace quire {
namespace QUIRE_NS {
namespace {

// The first `rotary` elements, rotated in pairs (i, i + rotary / 2); the others as they are.
void rotate(const float* x, const float* cos, const float* sin, int64_t rotary, int64_t dim, float* out) {
    const int64_t half = rotary / 2;
    map(half, [&](int64_t i, int n) {
        const Vec a = get(x + i, n), b = get(x + half + i, n);
        put(out + i, add(mul(a, get(cos + i, n)), mul(b, get(sin + i, n))), n);
        put(out + half + i, add(mul(b, get(cos + half + i, n)), mul(a, get(sin + half + i, n))), n);
    });
    map(dim - rotary, [&](int64_t i, int n) { put(out + rotary + i, get(x + rotary + i, n), n); });
}

template <class Format>
void write_key(const Cells<Format>& cells, int64_t slot, int64_t head, const float* x,
               typename Format::Element* encoded) {
    auto* cell = cells.keys(slot / cells.block_size, head);
    const int64_t token = slot % cells.block_size;
    const float scale = Format::encode(x, encoded, cells.dim);
    for (int64_t d = 0; d < cells.dim; ++d) cell[d * cells.block_size + token] = encoded[d];
    if (Format::SCALED) cells.set_scale(cell, token, scale);
}

template <class Format>
void write_value(const Cells<Format>& cells, int64_t slot, int64_t head, const float* x) {
    auto* cell = cells.values(slot / cells.block_size, head);
    const int64_t token = slot % cells.block_size;
    const float scale = Format::encode(x, cell + token * cells.dim, cells.dim);
    if (Format::SCALED) cells.set_scale(cell, token, scale);
}

}  // namespace

void prepare_qkv(const float* qkv, const float* q_weight, const float* k_weight, const float* cos, const float* sin,
                 const int64_t* slots, float* q, void* cache, int64_t tokens, int64_t num_written, int64_t heads,
                 int64_t kv_heads, int64_t dim, int64_t rotary, int64_t block_size, int64_t value_offset, int kv_type,
                 float eps, float offset) {
    const int64_t all = heads + 2 * kv_heads;
    with_format(kv_type, [&](auto format) {
        using Format = decltype(format);
        const Cells<Format> cells{(char*)cache, value_offset, kv_heads, dim, block_size};
        parallel(tokens, 1 + 32768 / (all * dim), [&](int64_t begin, int64_t end) {
            float* line = (float*)scratch(0, sizeof(float) * 3 * dim);
            auto* encoded = (typename Format::Element*)(line + 2 * dim);
            for (int64_t t = begin; t < end; ++t) {
                for (int64_t h = 0; h < heads + kv_heads; ++h) {
                    const bool is_query = h < heads;
                    if (!is_query && t >= num_written) break;
                    const float *source = qkv + (t * all + h) * dim, *weight = is_query ? q_weight : k_weight;
                    float* target = is_query ? q + (t * heads + h) * dim : line + dim;
                    if (weight) {
                        norm_row(source, weight, offset, eps, dim, rotary ? line : target);
                        source = rotary ? line : target;
                    }
                    if (rotary)
                        rotate(source, cos + t * rotary, sin + t * rotary, rotary, dim, target);
                    else if (!weight)
                        std::memcpy(target, source, sizeof(float) * dim);
                    if (!is_query) write_key(cells, slots[t], h - heads, target, encoded);
                }
                for (int64_t h = 0; h < kv_heads && t < num_written; ++h)
                    write_value(cells, slots[t], h, qkv + (t * all + heads + kv_heads + h) * dim);
            }
        });
    });
}

void gather_rotation(const float* table, const int64_t* positions, float* cos, float* sin, int64_t tokens,
                     int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t t = 0; t < tokens; ++t) {
        const float* line = table + positions[t] * rotary;
        for (int64_t i = 0; i < half; ++i) {
            cos[t * rotary + i] = cos[t * rotary + half + i] = line[i];
            sin[t * rotary + i] = -line[half + i];
            sin[t * rotary + half + i] = line[half + i];
        }
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
