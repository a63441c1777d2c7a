// The KV cache's layout and number formats.
//
// cache [2 (keys, values), blocks, kv_heads] of cells. A cell of keys is [dim, block_size]: transposed, so that the
// scores of neighbouring keys come from neighbouring lanes. A cell of values is [block_size, dim]. With int8 each cell
// ends with a float32 scale per token.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

enum KvType { KV_FLOAT32 = 0, KV_FLOAT16 = 1, KV_BFLOAT16 = 2, KV_INT8 = 3, KV_E4M3 = 4 };

static inline uint16_t brain_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Each format: its element, a vector of them as floats, and `encode`, which gives the scale that `n` elements need.
struct Float32 {
    using Element = float;
    static constexpr bool SCALED = false;
    static Vec read(const float* p) { return load(p); }
    static float encode(const float* x, float* out, int64_t n) {
        std::memcpy(out, x, sizeof(float) * n);
        return 1.0f;
    }
};

struct Float16 {
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static Vec read(const uint16_t* p) { return load_half(p); }
    static float encode(const float* x, uint16_t* out, int64_t n) {
        // What is too large becomes the largest: infinity would make every later token NaN. NaN is kept.
        const Vec most = set(65504.0f), least = set(-65504.0f);
        map(n, [&](int64_t i, int count) {
            uint16_t lanes[LANES];
            store_half(lanes, vmax(least, vmin(most, get(x + i, count))));
            std::memcpy(out + i, lanes, sizeof(uint16_t) * count);
        });
        return 1.0f;
    }
};

struct BFloat16 {
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static Vec read(const uint16_t* p) { return load_brain(p); }
    static float encode(const float* x, uint16_t* out, int64_t n) {
        for (int64_t i = 0; i < n; ++i) out[i] = brain_of(x[i]);
        return 1.0f;
    }
};

struct Int8 {
    using Element = int8_t;
    static constexpr bool SCALED = true;
    static Vec read(const int8_t* p) { return load_int8(p); }
    static float encode(const float* x, int8_t* out, int64_t n) {
        float most = 0, sum = 0;
        for (int64_t i = 0; i < n; ++i) {
            const float size = std::fabs(x[i]);
            most = size > most ? size : most;
            sum += size;
        }
        if (most == INFINITY || sum != sum) {  // infinite or NaN: so is all that is read from it
            std::memset(out, 1, n);
            return NAN;
        }
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        if (inverse == INFINITY) {  // all so small that the inverse overflows
            std::memset(out, 0, n);
            return 0.0f;
        }
        for (int64_t i = 0; i < n; ++i) out[i] = (int8_t)std::nearbyint(x[i] * inverse);
        return most / 127.0f;
    }
};

// 8-bit floats: four bits of exponent, three of mantissa, no infinities, and one NaN of either sign.
struct Float8 {
    using Element = uint8_t;
    static constexpr bool SCALED = false;
    static Vec read(const uint8_t* p) {
        const Vec x = load_e4m3(p);
        // NaN is read as 480, which alone overflows here: infinity times zero is NaN again.
        return fma(mul(x, set(1.9e38f)), zero(), mul(x, set(256.0f)));
    }
    static float encode(const float* x, uint8_t* out, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            const float size = std::fabs(x[i]) < 448.0f ? std::fabs(x[i]) : 448.0f;  // too large becomes the largest
            uint32_t bits, code;
            std::memcpy(&bits, &size, sizeof bits);
            if (size < 0.015625f)  // subnormal: multiples of 2^-9
                code = (uint32_t)std::nearbyint(size * 512.0f);
            else
                code = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
            out[i] = (uint8_t)((x[i] != x[i] ? 0x7F : code) | (std::signbit(x[i]) ? 0x80 : 0));
        }
        return 1.0f;
    }
};

template <class Format>
struct Cells {
    using Element = typename Format::Element;
    char* base;
    int64_t value_offset, kv_heads, dim, block_size;

    int64_t cell_bytes() const {
        return block_size * dim * (int64_t)sizeof(Element) + (Format::SCALED ? 4 * block_size : 0);
    }
    Element* keys(int64_t block, int64_t head) const {
        return reinterpret_cast<Element*>(base + (block * kv_heads + head) * cell_bytes());
    }
    Element* values(int64_t block, int64_t head) const {
        return reinterpret_cast<Element*>(base + value_offset + (block * kv_heads + head) * cell_bytes());
    }
    float scale(const Element* cell, int64_t token) const {
        float scale;
        std::memcpy(&scale, cell + block_size * dim + 4 * token, sizeof scale);
        return scale;
    }
    void set_scale(Element* cell, int64_t token, float scale) const {
        std::memcpy(cell + block_size * dim + 4 * token, &scale, sizeof scale);
    }
};

// Call f with the format's type.
template <class F>
static inline void with_format(int type, F f) {
    switch (type) {
        case KV_FLOAT16: return f(Float16());
        case KV_BFLOAT16: return f(BFloat16());
        case KV_INT8: return f(Int8());
        case KV_E4M3: return f(Float8());
        default: return f(Float32());
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
