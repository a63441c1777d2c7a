// From projected qkv to attention's input: head norms and rotation, and keys and values into the cache.
#include "kv_cache.h"
#include "norm.h"
#include "rotate.h"

namespace quire {
namespace QUIRE_NS {
namespace {

template <class Format>
void write_key(const Cells<Format>& cells, int64_t slot, int64_t head, const float* x,
               typename Format::Element* encoded) {
    auto* cell = cells.keys(slot / cells.block_size, head);
    const int64_t token = slot % cells.block_size;
    const float scale = Format::encode(x, encoded, cells.dim);
    for (int64_t d = 0; d < cells.dim; ++d) cell[d * cells.block_size + token] = encoded[d];
    if (Format::SCALED) cells.set_scale(cell, token, scale);
}

// Keys [LANES, dim] of consecutive slots of one block.
template <class Format>
void write_keys(const Cells<Format>& cells, int64_t slot, int64_t head, const float* x) {
    auto* cell = cells.keys(slot / cells.block_size, head) + slot % cells.block_size;
    for (int64_t d = 0; d < cells.dim; d += LANES) {
        Vec part[LANES];
        for (int t = 0; t < LANES; ++t) part[t] = load(x + t * cells.dim + d);
        transpose(part);
        for (int i = 0; i < LANES; ++i) {
            float lanes[LANES];
            store(lanes, part[i]);
            Format::encode(lanes, cell + (d + i) * cells.block_size, LANES);
        }
    }
}

template <class Format>
void write_value(const Cells<Format>& cells, int64_t slot, int64_t head, const float* x) {
    auto* cell = cells.values(slot / cells.block_size, head);
    const int64_t token = slot % cells.block_size;
    const float scale = Format::encode(x, cell + token * cells.dim, cells.dim);
    if (Format::SCALED) cells.set_scale(cell, token, scale);
}

// LANES tokens from `t` on have consecutive slots of one block, so that their keys can be written together.
template <class Format>
bool together(const Cells<Format>& cells, const int64_t* slots, int64_t t, int64_t end) {
    const bool whole = cells.dim % LANES == 0 && cells.block_size % LANES == 0;
    if (Format::SCALED || !whole || t + LANES > end || slots[t] % LANES) return false;
    for (int i = 1; i < LANES; ++i)
        if (slots[t + i] != slots[t] + i) return false;
    return true;
}

constexpr int64_t CHUNK = 16;  // tokens of a piece of work: a block's, since two threads should not write to one

}  // namespace

void prepare_qkv(const float* qkv, const float* q_weight, const float* k_weight, const float* cos, const float* sin,
                 const int64_t* slots, float* q, void* cache, int64_t tokens, int64_t num_written, int64_t heads,
                 int64_t kv_heads, int64_t dim, int64_t rotary, int64_t block_size, int64_t value_offset, int kv_type,
                 float eps, float offset, int norm_last, float key_scale, float value_scale) {
    const int64_t all = heads + 2 * kv_heads;
    const auto turn = [&](int64_t t, int64_t head, const float* weight, float* line, float* target) {
        const float* source = qkv + (t * all + head) * dim;
        if (weight && rotary && norm_last) {
            rotate(source, cos + t * rotary, sin + t * rotary, rotary, dim, line);
            return norm_row(line, weight, offset, eps, dim, target);
        }
        if (weight) {
            norm_row(source, weight, offset, eps, dim, rotary ? line : target);
            source = rotary ? line : target;
        }
        if (rotary)
            rotate(source, cos + t * rotary, sin + t * rotary, rotary, dim, target);
        else if (!weight)
            std::memcpy(target, source, sizeof(float) * dim);
    };
    const auto divided = [&](const float* x, float scale, float* out) {
        if (scale == 1.0f) return x;
        map(dim, [&](int64_t i, int n) { put(out + i, div(get(x + i, n), set(scale)), n); });
        return (const float*)out;
    };
    with_format(kv_type, [&](auto format) {
        using Format = decltype(format);
        const Cells<Format> cells{(char*)cache, value_offset, kv_heads, dim, block_size};
        parallel((tokens + CHUNK - 1) / CHUNK, 1 + 8192 / (CHUNK * all * dim), [&](int64_t begin, int64_t end) {
            float *line = (float*)scratch(0, sizeof(float) * (LANES + 2) * dim), *keys = line + dim;
            auto* encoded = (typename Format::Element*)(keys + LANES * dim);
            const int64_t last = end * CHUNK < tokens ? end * CHUNK : tokens;
            for (int64_t t = begin * CHUNK; t < last; ++t)
                for (int64_t h = 0; h < heads; ++h) turn(t, h, q_weight, line, q + (t * heads + h) * dim);
            const int64_t written = last < num_written ? last : num_written;
            for (int64_t t = begin * CHUNK, count; t < written; t += count) {
                count = together(cells, slots, t, written) ? LANES : 1;
                if (slots[t] < 0) continue;  // another rank keeps it
                for (int64_t h = 0; h < kv_heads; ++h) {
                    for (int64_t i = 0; i < count; ++i) {
                        turn(t + i, heads + h, k_weight, line, keys + i * dim);
                        divided(keys + i * dim, key_scale, keys + i * dim);
                    }
                    if (count == 1)
                        write_key(cells, slots[t], h, keys, encoded);
                    else
                        write_keys(cells, slots[t], h, keys);
                    for (int64_t i = 0; i < count; ++i) {
                        const float* value = qkv + ((t + i) * all + heads + kv_heads + h) * dim;
                        write_value(cells, slots[t + i], h, divided(value, value_scale, line));
                    }
                }
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
