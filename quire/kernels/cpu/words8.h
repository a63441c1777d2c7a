// Rows rounded to 8-bit integers, four in a word: the largest of each 32 becomes 127, so that x is off by 1 / 254 of that
// one at most. Sums of integers are exact on every instruction set. See integer_matmul.h.
#pragma once
#include "integers.h"
#include "plan.h"

#define QUIRE_WORDS words8
namespace quire {
namespace QUIRE_NS {
namespace QUIRE_WORDS {

// A word holds the elements 0, 2, 4, 6 of eight or 1, 3, 5, 7, as the words of 4-bit codes have them in their halves of
// bytes. Before the words of each BLOCK a row has its scale, the sum of its integers, and where sums begin.
constexpr int PER_WORD = 4, HEADER = 4;
constexpr int64_t DEPTH = 576;  // elements along k that a tile of weights holds
#if defined(__AVX512VNNI__)
// The instruction takes weights without a sign: those of 8 bits are 128 more, which sums begin without.
constexpr bool BIASES = true;
constexpr int PASS_ROWS = 6;  // see words16.h
constexpr int64_t MOST_PASSED_4 = 128, MOST_PASSED_8 = 6;
static inline Ints dot_words(Ints total, Ints w, Ints x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(w), "v"(x));  // not the intrinsic: see `dot`
    return total;
}
template <int I>
static inline Ints nibble_word(Words w) {
    return _mm512_and_si512(I ? _mm512_srli_epi32(w, 4) : w, _mm512_set1_epi32(0x0f0f0f0f));
}
static inline Ints table_word(Ints places) {
    const __m128i table = _mm_setr_epi8(QUIRE_E2M1_BYTES(128));  // 128 more, without a sign
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), places);
}
// Of eight lines of 16 bytes, four bytes of each output.
template <int I>
static inline Ints line_word(const uint8_t* p) {
    const __m512i low = _mm512_loadu_si512(p), high = _mm512_loadu_si512(p + 64);
    const __m512i lines = _mm512_add_epi32(_mm512_set_epi32(27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0),
                                           _mm512_set1_epi32(4 * I));
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i four = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(low, lines, high), order);
    return _mm512_xor_si512(four, _mm512_set1_epi32((int)0x80808080));
}
// The lowest bytes of 32 lanes, the even ones of eight before the odd ones.
static inline void low_bytes(const Vec* v, int32_t* words) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int i = 0; i < 2; ++i) {
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_castps_si512(v[i]));
        _mm_storeu_si128((__m128i*)(words + 4 * i), _mm_shuffle_epi8(bytes, order));
    }
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr bool BIASES = false;
constexpr int PASS_ROWS = MOST_DIRECT_ROWS;
constexpr int64_t MOST_PASSED_4 = PASS_ROWS, MOST_PASSED_8 = PASS_ROWS;
static inline Ints dot_words(Ints total, Ints w, Ints x) {
    // Two products of at most 128 * 127 fit 16 bits.
    const Ints pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int I>
static inline Ints nibble_word(Words w) {
    return _mm256_and_si256(I ? _mm256_srli_epi32(w, 4) : w, _mm256_set1_epi32(0x0f0f0f0f));
}
static inline Ints table_word(Ints places) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(QUIRE_E2M1_BYTES(0))), places);
}
template <int I>
static inline Ints line_word(const uint8_t* p) {
    const auto line = [&](int i) { return _mm_loadl_epi64((const __m128i*)(p + (I + 2 * i) * PANEL)); };
    const __m128i first = _mm_unpacklo_epi8(line(0), line(1)), second = _mm_unpacklo_epi8(line(2), line(3));
    return _mm256_set_m128i(_mm_unpackhi_epi16(first, second), _mm_unpacklo_epi16(first, second));
}
static inline void low_bytes(const Vec* v, int32_t* words) {
    __m256i in[4];
    for (int i = 0; i < 4; ++i)  // with their sign, so that packing cuts nothing off
        in[i] = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(v[i]), 24), 24);
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(in[0], in[1]), _mm256_packs_epi32(in[2], in[3]));
    const __m256i sorted = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    _mm256_storeu_si256((__m256i*)words, _mm256_shuffle_epi8(sorted, order));
}
#else
constexpr bool BIASES = false;
constexpr int PASS_ROWS = MOST_DIRECT_ROWS;
constexpr int64_t MOST_PASSED_4 = PASS_ROWS, MOST_PASSED_8 = PASS_ROWS;
static inline Ints dot_words(Ints total, Ints w, Ints x) {
    return each_int([&](int i) {
        int32_t sum = total.x[i];
        for (int shift = 0; shift < 32; shift += 8) sum += (int8_t)(w.x[i] >> shift) * (int8_t)(x.x[i] >> shift);
        return sum;
    });
}
template <int I>
static inline Ints nibble_word(Words w) {
    return each_int([&](int i) { return (int32_t)(w.x[i] >> (4 * I) & 0x0f0f0f0f); });
}
static inline Ints table_word(Ints places) {
    constexpr int8_t TABLE[] = {QUIRE_E2M1_BYTES(0)};
    return each_int([&](int i) {
        uint32_t word = 0;
        for (int shift = 0; shift < 32; shift += 8) word |= (uint32_t)(uint8_t)TABLE[places.x[i] >> shift & 15] << shift;
        return (int32_t)word;
    });
}
template <int I>
static inline Ints line_word(const uint8_t* p) {
    return each_int([&](int i) {
        uint32_t word = 0;
        for (int k = 0; k < 4; ++k) word |= (uint32_t)p[(I + 2 * k) * PANEL + i] << (8 * k);
        return (int32_t)word;
    });
}
static inline void low_bytes(const Vec* v, int32_t* words) {
    for (int w = 0; w < BLOCK / 4; ++w) {
        uint32_t word = 0;
        for (int k = 0; k < 4; ++k) {
            const int at = w / 2 * 8 + w % 2 + 2 * k;
            word |= (lane_bits(v[at / LANES].x[at % LANES]) & 0xff) << (8 * k);
        }
        words[w] = (int32_t)word;
    }
}
#endif

// One row's BLOCK, of which `count` elements are there. `header` and `words` are of one row among `rows`.
inline void encode_row(const float* x, int64_t count, int64_t rows, int32_t* header, int32_t* words) {
    const Rounded block = rounded<127>(x, count);
    const float all = block.low + block.high;
    const bool finite = block.scale == block.scale;
    std::memcpy(header, &block.scale, sizeof block.scale);
    std::memcpy(header + rows, &all, sizeof all);
    header[2 * rows] = finite ? -128 * (int32_t)block.low : 0;
    header[3 * rows] = finite ? -128 * (int32_t)block.high : 0;
    int32_t made[BLOCK / PER_WORD];
    low_bytes(block.values, made);
    for (int w = 0; w < BLOCK / PER_WORD; ++w) words[w * rows] = made[w];
}

// x [ROWS][stride], `depth` elements of each.
template <int ROWS>
void encode(const float* x, int64_t stride, int64_t depth, int32_t* out) {
    for (int64_t k = 0; k < depth; k += BLOCK, out += (HEADER + BLOCK / PER_WORD) * ROWS)
        for (int r = 0; r < ROWS; ++r)
            encode_row(x + r * stride + k, depth - k, ROWS, out + r, out + HEADER * ROWS + r);
}

}  // namespace QUIRE_WORDS
}  // namespace QUIRE_NS
}  // namespace quire
