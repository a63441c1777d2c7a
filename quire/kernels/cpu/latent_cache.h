// The cache of latent attention: [blocks, block_size] lines, one for each token, which are keys and, at their beginning,
// values. With int8 a line ends with a float32 scale.
#pragma once
#include "kv_cache.h"

namespace quire {
namespace QUIRE_NS {

template <class Format>
struct LatentCells {
    using Element = typename Format::Element;
    char* base;
    int64_t dim, block_size, line_bytes;

    Element* line(int64_t slot) const { return reinterpret_cast<Element*>(base + slot * line_bytes); }
    float scale(int64_t slot) const {
        float scale;
        std::memcpy(&scale, base + (slot + 1) * line_bytes - sizeof scale, sizeof scale);
        return scale;
    }
    void write(int64_t slot, const float* x) const {
        const float scale = Format::encode(x, line(slot), dim);
        if (Format::SCALED) std::memcpy(base + (slot + 1) * line_bytes - sizeof scale, &scale, sizeof scale);
    }
};

}  // namespace QUIRE_NS
}  // namespace quire
