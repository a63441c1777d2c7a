// Rows rounded to 16-bit integers, two in a word: the largest of each 32 becomes 32767, so that x is off by 1 / 65534 of
// that one at most. See integer_products.h.
#pragma once
#include "integers.h"
#include "plan.h"

#define QUIRE_WORDS words16
namespace quire {
namespace QUIRE_NS {
namespace QUIRE_WORDS {

constexpr int PER_WORD = 2, HEADER = 2;
constexpr bool BIASES = false;
constexpr int64_t DEPTH = 288;  // elements along k that a tile of weights holds
#if defined(__AVX512VNNI__)
constexpr int PASS_ROWS = 8;  // rows that a panel is multiplied with at a time
// Rows for which making codes anew in every pass is faster than making a tile of them, if these have 4 bits and 8.
constexpr int64_t MOST_PASSED_4 = 40, MOST_PASSED_8 = 16;
#else
constexpr int PASS_ROWS = MOST_DIRECT_ROWS;
constexpr int64_t MOST_PASSED_4 = PASS_ROWS, MOST_PASSED_8 = PASS_ROWS;
#endif

// ---- rows of x: for each BLOCK along k the scale of each row, the sum of its integers, and [BLOCK / 2][rows] pairs
constexpr int64_t block_words(int64_t rows) { return (HEADER + BLOCK / PER_WORD) * rows; }

// One row's BLOCK, of which `count` elements are there; pairs become vectors of LANES.
inline void encode_row(const float* x, int64_t count, float* scale, float* sum, Vec* pairs) {
    constexpr int N = BLOCK / LANES;
    Vec v[N], most = zero(), total = zero();
    for (int i = 0; i < N; ++i) {
        const int64_t left = count - i * LANES;
        v[i] = left >= LANES ? load(x + i * LANES) : left > 0 ? load_part(x + i * LANES, (int)left) : zero();
        most = vmax(most, vmax(v[i], sub(zero(), v[i])));
    }
    const float unit = max_lane(most) * (1.0f / 32767.0f);
    const float step = unit < 0x1p-126f ? 0x1p-126f : unit;  // its inverse must not overflow
    const Vec inverse = set(1.0f / step);
    for (int i = 0; i < N; ++i) {
        v[i] = fma(v[i], inverse, set(ROUNDER));
        total = add(total, sub(v[i], set(ROUNDER)));
    }
    *sum = QUIRE_NS::sum(total);
    *scale = step + (*sum - *sum);  // NaN if anything is not finite: then the sum is NaN, as infinity times zero is
    for (int i = 0; i < N; i += 2)
        pairs[i / 2] = pair_up(even_quarters(v[i], v[i + 1]), odd_quarters(v[i], v[i + 1]));
}

// x [ROWS][stride], `depth` elements of each.
template <int ROWS>
void encode(const float* x, int64_t stride, int64_t depth, int32_t* out) {
    constexpr int N = (BLOCK / 2) / LANES;
    static_assert(ROWS <= LANES, "rows are transposed in one go");
    for (int64_t k = 0; k < depth; k += BLOCK, out += block_words(ROWS)) {
        float *scales = (float*)out, *sums = scales + ROWS, *to = sums + ROWS;
        Vec rows[N][LANES];
        for (int i = 0; i < N; ++i)
            for (int r = 0; r < LANES; ++r) rows[i][r] = zero();
        for (int r = 0; r < ROWS; ++r) {
            Vec pairs[N];
            encode_row(x + r * stride + k, depth - k, scales + r, sums + r, pairs);
            for (int i = 0; i < N; ++i) rows[i][r] = pairs[i];
        }
        for (int i = 0; i < N; ++i) {
            transpose(rows[i]);
            for (int j = 0; j < LANES; ++j) put(to + (i * LANES + j) * ROWS, rows[i][j], ROWS);
        }
    }
}

inline Ints dot_words(Ints total, Ints w, Ints x) { return dot(total, w, x); }

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
        for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(from + line);
    }
    // Elements I and I + 4.
    template <int I>
    inline Ints word(int v) const {
        if constexpr (LAYOUTS[F].bits == 4)
            return nibble_pair<I>(words[v]);
        else
            return byte_pair(p + I * PANEL + v * LANES, p + (I + 4) * PANEL + v * LANES);
    }
};

}  // namespace QUIRE_WORDS
}  // namespace QUIRE_NS
}  // namespace quire
