// Rows rounded to 16-bit integers, two in a word: the largest of each 32 becomes 32767, so that x is off by 1 / 65534 of
// that one at most. See integer_matmul.h.
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
constexpr int PASS_ROWS = 6;  // rows that a panel is multiplied with at a time
// Rows for which making codes anew in every pass is faster than making a tile of them, if these have 4 bits and 8.
constexpr int64_t MOST_PASSED_4 = 128, MOST_PASSED_8 = 6;
#else
constexpr int PASS_ROWS = MOST_DIRECT_ROWS;
constexpr int64_t MOST_PASSED_4 = PASS_ROWS, MOST_PASSED_8 = PASS_ROWS;
#endif

// For each BLOCK along k the scale of each row, the sum of its integers, and [BLOCK / 2][rows] pairs.
// x [ROWS][stride], `depth` elements of each.
template <int ROWS>
void encode(const float* x, int64_t stride, int64_t depth, int32_t* out) {
    constexpr int N = (BLOCK / 2) / LANES;
    static_assert(ROWS <= LANES, "rows are transposed in one go");
    for (int64_t k = 0; k < depth; k += BLOCK, out += (HEADER + BLOCK / PER_WORD) * ROWS) {
        float *scales = (float*)out, *sums = scales + ROWS, *to = sums + ROWS;
        Vec rows[N][LANES];
        for (int i = 0; i < N; ++i)
            for (int r = 0; r < LANES; ++r) rows[i][r] = zero();
        for (int r = 0; r < ROWS; ++r) {
            const Rounded block = rounded<32767>(x + r * stride + k, depth - k);
            scales[r] = block.scale, sums[r] = block.low + block.high;
            const Vec* v = block.values;
            for (int i = 0; i < N; ++i)
                rows[i][r] = pair_up(even_quarters(v[2 * i], v[2 * i + 1]), odd_quarters(v[2 * i], v[2 * i + 1]));
        }
        for (int i = 0; i < N; ++i) {
            transpose(rows[i]);
            for (int j = 0; j < LANES; ++j) put(to + (i * LANES + j) * ROWS, rows[i][j], ROWS);
        }
    }
}

inline Ints dot_words(Ints total, Ints w, Ints x) { return dot(total, w, x); }

// Elements I and I + 4 of eight.
template <int I>
inline Ints nibble_word(Words w) {
    return nibble_pair<I>(w);
}
inline Ints table_word(Ints places) { return table_pair(places); }
template <int I>
inline Ints line_word(const uint8_t* p) {
    return byte_pair(p + I * PANEL, p + (I + 4) * PANEL);
}

}  // namespace QUIRE_WORDS
}  // namespace QUIRE_NS
}  // namespace quire
