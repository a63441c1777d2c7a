// The sparse indexer of latent attention: its keys in the cache, scores of all keys that a token sees, the best of them.
#include "latent_cache.h"
#include "rotate.h"

#include <type_traits>

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int HEADS = 8;            // whose scores are in registers together
constexpr int64_t CHUNK = 512;      // keys of a piece of work, where tokens are fewer than threads
constexpr int DIGITS = 4, BINS = 256;

struct Index {
    const float* q;        // [tokens, heads, dim]
    const float* weights;  // [tokens, heads]
    const int32_t* tables;
    const int64_t* rows;
    const int32_t* contexts;
    const int32_t* starts;
    int64_t num_rows, table_stride, heads, dim, block_size;

    // The row that a token belongs to, or -1 for padding, and the number of keys that it sees.
    int64_t row_of(int64_t token, int64_t* seen) const {
        int64_t low = 0, high = num_rows;  // starts[low] <= token < starts[high]
        *seen = 0;
        if (token >= starts[num_rows]) return -1;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (starts[middle] <= token ? low : high) = middle;
        }
        *seen = contexts[low] - (starts[low + 1] - token) + 1;
        return low;
    }
    const int32_t* table(int64_t row) const { return tables + rows[row] * table_stride; }
    int64_t slot(const int32_t* table, int64_t position) const {
        return (int64_t)table[position / block_size] * block_size + position % block_size;
    }
};

// In a cache of 8-bit floats, index queries and keys are codes times 2^(exponent - 63). A byte behind a key has its exponent.
float scale_of(int exponent) {
    const uint32_t bits = (uint32_t)(exponent + 64) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
}

// Codes of x and their exponent, by which the largest is in [128, 256); `scaled` has room for n numbers.
uint8_t encode(const float* x, int64_t n, float* scaled, uint8_t* codes) {
    float most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    uint32_t bits;
    std::memcpy(&bits, &most, sizeof bits);
    const int wanted = (int)(bits >> 23) - 71, exponent = wanted < 0 ? 0 : wanted > 126 ? 126 : wanted;
    const float inverse = 1.0f / scale_of(exponent);
    for (int64_t i = 0; i < n; ++i) scaled[i] = x[i] * inverse;
    Float8::encode(scaled, codes, n);
    return (uint8_t)exponent;
}

// Scores of keys [begin, end) of a row: heads are added from the first to the last, whatever the range.
template <class Format>
void score(const Index& index, const LatentCells<Format>& cells, int64_t token, const int32_t* table, int64_t begin,
           int64_t end, uint32_t* out) {
    using Element = typename Format::Element;
    const int64_t dim = index.dim, heads = index.heads;
    float* keys = (float*)scratch(0, sizeof(float) * ((dim + LANES - 1) / LANES * LANES) * LANES);
    const float *q = index.q + token * heads * dim, *weights = index.weights + token * heads;
    for (int64_t first = begin; first < end; first += LANES) {
        const int count = end - first < LANES ? (int)(end - first) : LANES;
        const Element* line[LANES];
        float scales[LANES];
        for (int i = 0; i < LANES; ++i) {
            const int64_t slot = index.slot(table, i < count ? first + i : end - 1);
            line[i] = cells.line(slot);
            scales[i] = Format::SCALED ? cells.scale(slot) : 1.0f;
            if constexpr (std::is_same_v<Format, Float8>) scales[i] = scale_of(line[i][dim]);
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            const int64_t width = dim - d < LANES ? dim - d : LANES;
            Vec part[LANES];
            for (int i = 0; i < LANES; ++i) {
                if (width == LANES) {
                    part[i] = Format::read(line[i] + d);
                } else {
                    Element lanes[LANES] = {};
                    std::memcpy(lanes, line[i] + d, sizeof(Element) * width);
                    part[i] = Format::read(lanes);
                }
            }
            transpose(part);
            for (int i = 0; i < LANES; ++i) store(keys + (d + i) * LANES, part[i]);
        }
        Vec total = zero();
        for (int64_t h = 0; h < heads; h += HEADS) {
            const int some = heads - h < HEADS ? (int)(heads - h) : HEADS;
            Vec acc[HEADS];
            for (int j = 0; j < HEADS; ++j) acc[j] = zero();
            if (some == HEADS) {
                for (int64_t d = 0; d < dim; ++d) {
                    const Vec key = load(keys + d * LANES);
                    for (int j = 0; j < HEADS; ++j) acc[j] = fma(set(q[(h + j) * dim + d]), key, acc[j]);
                }
            } else {
                for (int64_t d = 0; d < dim; ++d) {
                    const Vec key = load(keys + d * LANES);
                    for (int j = 0; j < some; ++j) acc[j] = fma(set(q[(h + j) * dim + d]), key, acc[j]);
                }
            }
            for (int j = 0; j < some; ++j) total = fma(set(weights[h + j]), vmax(acc[j], zero()), total);
        }
        float scores[LANES];
        store(scores, add(mul(total, load(scales)), zero()));  // no negative zero, which would come after zero
        for (int i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, scores + i, sizeof bits);
            // In the order of the numbers; NaN is the least.
            out[first + i] = scores[i] != scores[i] ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
        }
    }
}

// Slots of the `top` highest keys, in the order of their positions; of equals those of lower positions.
void choose(const Index& index, const uint32_t* keys, int64_t seen, int64_t top, const int32_t* table, int32_t* out) {
    uint32_t bound = 0, equals = (uint32_t)top;
    if (seen > top) {
        uint32_t mask = 0;
        for (int digit = DIGITS - 1; digit >= 0; --digit) {
            uint32_t counts[BINS] = {};
            const int shift = 8 * digit;
            for (int64_t i = 0; i < seen; ++i)
                if ((keys[i] & mask) == bound) ++counts[keys[i] >> shift & (BINS - 1)];
            uint32_t bin = BINS - 1;
            while (counts[bin] < equals) equals -= counts[bin--];
            bound |= bin << shift;
            mask |= (uint32_t)(BINS - 1) << shift;
        }
    }
    for (int64_t i = 0; i < seen; ++i) {
        if (keys[i] < bound || (keys[i] == bound && equals == 0)) continue;
        equals -= keys[i] == bound;
        *out++ = (int32_t)index.slot(table, i);
    }
}

}  // namespace

void prepare_index(const float* q, int64_t q_token, const float* key, int64_t key_token, const float* weights,
                   int64_t weights_token, const float* cos, const float* sin, const int64_t* slots, float* query,
                   float* query_weights, void* keys, int64_t tokens, int64_t num_written, int64_t heads, int64_t dim,
                   int64_t rope, int64_t line_bytes, int64_t piece_bytes, int kv_type) {
    with_format(kv_type, [&](auto format) {
        using Format = decltype(format);
        constexpr bool IN_FP8 = std::is_same_v<Format, Float8>;
        const LatentCells<Format> cells{(char*)keys, dim, 1, line_bytes, piece_bytes};
        parallel(tokens, 1 + 8192 / ((heads + 1) * dim), [&](int64_t begin, int64_t end) {
            const int64_t padded = (dim + LANES - 1) / LANES * LANES;
            float *line = (float*)scratch(0, sizeof(float) * 3 * padded), *scaled = line + padded;
            uint8_t* codes = (uint8_t*)(scaled + padded);
            std::memset(codes, 0, padded);
            for (int64_t t = begin; t < end; ++t) {
                const auto turn = [&](const float* x, float* out) {
                    if (cos)
                        rotate(x, cos + t * rope, sin + t * rope, rope, dim, out);
                    else
                        std::memcpy(out, x, sizeof(float) * dim);
                };
                std::memcpy(query_weights + t * heads, weights + t * weights_token, sizeof(float) * heads);
                for (int64_t h = 0; h < heads; ++h) {
                    float* out = query + (t * heads + h) * dim;
                    turn(q + t * q_token + h * dim, out);
                    if (!IN_FP8) continue;
                    query_weights[t * heads + h] *= scale_of(encode(out, dim, scaled, codes));
                    for (int64_t d = 0; d < padded; d += LANES) store(line + d, Float8::read(codes + d));
                    std::memcpy(out, line, sizeof(float) * dim);
                }
                if (t >= num_written) continue;
                turn(key + t * key_token, line);
                if constexpr (IN_FP8) {
                    cells.line(slots[t])[dim] = encode(line, dim, scaled, cells.line(slots[t]));
                } else {
                    cells.write(slots[t], line);
                }
            }
        });
    });
}

void select_keys(const float* q, const float* weights, const void* keys, const int32_t* tables, const int64_t* rows,
                 const int32_t* contexts, const int32_t* starts, int32_t* slots, int32_t* counts,
                 int64_t* lines, int32_t* firsts, int64_t tokens, int64_t num_rows, int64_t table_stride,
                 int64_t line_bytes, int64_t piece_bytes, int64_t heads, int64_t dim, int64_t top_k, int64_t block_size,
                 int kv_type) {
    for (int64_t t = 0; t < tokens; ++t) lines[t] = t, firsts[t] = (int32_t)t;
    firsts[tokens] = (int32_t)tokens;
    const Index index{q, weights, tables, rows, contexts, starts, num_rows, table_stride, heads, dim, block_size};
    const auto finish = [&](int64_t token, const uint32_t* scores) {
        int64_t seen;
        const int64_t row = index.row_of(token, &seen), top = seen < top_k ? seen : top_k;
        counts[token] = (int32_t)(row < 0 ? 1 : top);  // padding sees the null block
        std::memset(slots + token * top_k + top, 0, sizeof(int32_t) * (top_k - top));
        if (row >= 0) choose(index, scores, seen, top, index.table(row), slots + token * top_k);
    };
    with_format(kv_type, [&](auto format) {
        using Format = decltype(format);
        const LatentCells<Format> cells{(char*)const_cast<void*>(keys), dim, block_size, line_bytes, piece_bytes};
        const auto scores_of = [&](int64_t token, int64_t begin, int64_t end, uint32_t* out) {
            int64_t seen;
            const int64_t row = index.row_of(token, &seen);
            if (seen <= top_k) return;  // all are taken
            score<Format>(index, cells, token, index.table(row), begin, end < seen ? end : seen, out);
        };
        int64_t longest = 1;
        for (int64_t r = 0; r < num_rows; ++r) longest = contexts[r] > longest ? contexts[r] : longest;
        if (tokens >= 2 * num_threads()) {
            parallel(tokens, 1, [&](int64_t begin, int64_t end) {
                uint32_t* scores = (uint32_t*)scratch(1, sizeof(uint32_t) * longest);
                for (int64_t t = begin; t < end; ++t) {
                    scores_of(t, 0, longest, scores);
                    finish(t, scores);
                }
            });
            return;
        }
        uint32_t* scores = (uint32_t*)scratch(1, sizeof(uint32_t) * longest * tokens);
        const int64_t chunks = (longest + CHUNK - 1) / CHUNK;
        parallel(tokens * chunks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                scores_of(i / chunks, i % chunks * CHUNK, (i % chunks + 1) * CHUNK, scores + i / chunks * longest);
        });
        parallel(tokens, 1, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) finish(t, scores + t * longest);
        });
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
