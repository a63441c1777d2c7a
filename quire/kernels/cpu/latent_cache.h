// The cache of latent attention: [blocks, block_size] lines, one for each token, which are keys and, at their beginning,
// values. With int8 a line ends with a float32 scale. The keys of a sparse indexer are a piece inside of these lines, with a
// scale at its own end.
#pragma once
#include "kv_cache.h"

namespace quire {
namespace QUIRE_NS {

template <class Format>
struct LatentCells {
    using Element = typename Format::Element;
    char* base;
    int64_t dim, block_size, line_bytes;
    int64_t piece_bytes = 0;  // from a line's beginning to the end of its scale; 0: all of it

    Element* line(int64_t slot) const { return reinterpret_cast<Element*>(base + slot * line_bytes); }
    float scale(int64_t slot) const {
        float scale;
        std::memcpy(&scale, scale_at(slot), sizeof scale);
        return scale;
    }
    char* scale_at(int64_t slot) const {
        return base + slot * line_bytes + (piece_bytes ? piece_bytes : line_bytes) - sizeof(float);
    }
    void write(int64_t slot, const float* x) const {
        const float scale = Format::encode(x, line(slot), dim);
        if (Format::SCALED) std::memcpy(scale_at(slot), &scale, sizeof scale);
    }
};

}  // namespace QUIRE_NS
}  // namespace quire
