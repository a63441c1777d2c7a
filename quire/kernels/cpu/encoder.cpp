// What encoders do before and behind their layers: positions and token types added to embeddings, hidden states summed.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t GRAIN = 8192;   // elements that are worth another thread
constexpr int TYPE_SHIFT = 32;    // bits of a place that are the position; those above are the token type
constexpr int64_t POSITION = ((int64_t)1 << TYPE_SHIFT) - 1;
constexpr int TILE = 64;          // tokens of a partial sum, as in ops/encoder.py

// The sum of `count` rows of N lanes, `stride` apart: halves are added to each other, absent rows being zero.
inline Vec tile_sum(const float* x, int64_t count, int64_t stride, int n) {
    Vec v[TILE];
    for (int i = 0; i < TILE; ++i) v[i] = i < count ? get(x + i * stride, n) : zero();
    for (int half = TILE / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) v[i] = add(v[i], v[i + half]);
    return v[0];
}

}  // namespace

void mark_second(const int64_t* index, const int64_t* rows, const int32_t* starts, const int64_t* second, int64_t* out,
                 int64_t num_rows, int64_t size) {
    for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t i = starts[r]; i < starts[r + 1]; ++i)
            out[i] = index[i] + ((int64_t)(index[i] >= second[rows[r]]) << TYPE_SHIFT);
    for (int64_t i = starts[num_rows]; i < size; ++i) out[i] = index[i];
}

void positions_of(const int64_t* places, int64_t* out, int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) out[t] = places[t] & POSITION;
}

void add_places(const float* x, const float* positions, const float* types, const int64_t* places, float* out,
                int64_t tokens, int64_t width, int64_t first) {
    parallel(tokens, 1 + GRAIN / width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t position = (places[t] & POSITION) + first, type = places[t] >> TYPE_SHIFT;
            map(width, [&](int64_t i, int n) {
                Vec v = get(x + t * width + i, n);
                if (types) v = add(v, get(types + type * width + i, n));
                if (positions) v = add(v, get(positions + position * width + i, n));
                put(out + t * width + i, v, n);
            });
        }
    });
}

void prompt_sums(const float* x, const int64_t* starts, const int64_t* counts, float* out, int64_t prompts,
                 int64_t width) {
    parallel(prompts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const float* from = x + starts[p] * width;
            map(width, [&](int64_t i, int n) {
                Vec total = tile_sum(from + i, counts[p], width, n);
                for (int64_t t = TILE; t < counts[p]; t += TILE)
                    total = add(total, tile_sum(from + t * width + i, counts[p] - t, width, n));
                put(out + p * width + i, total, n);
            });
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
