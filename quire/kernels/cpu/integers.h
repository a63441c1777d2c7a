// Vectors of 16-bit integers in pairs, multiplied and added in 32 bits: twice as many products as of floats where the
// processor has an instruction for it. Sums of integers are exact, so their order does not matter.
#pragma once
#include "panels.h"

namespace quire {
namespace QUIRE_NS {

// The doubled 4-bit floats, as bytes.
#define QUIRE_E2M1_BYTES(BIAS)                                                                                   \
    (char)(0 + BIAS), (char)(1 + BIAS), (char)(2 + BIAS), (char)(3 + BIAS), (char)(4 + BIAS), (char)(6 + BIAS),   \
        (char)(8 + BIAS), (char)(12 + BIAS), (char)(0 + BIAS), (char)(-1 + BIAS), (char)(-2 + BIAS),              \
        (char)(-3 + BIAS), (char)(-4 + BIAS), (char)(-6 + BIAS), (char)(-8 + BIAS), (char)(-12 + BIAS)

// A lane of `Ints` is a sum, or a pair of int16: elements k (low half) and k + 4 of eight, as the words of 4-bit codes
// have them side by side.
#if defined(__AVX512VNNI__)
constexpr int INT_ROWS = 6, INT_PANELS = 2;  // of a tile
constexpr bool SUMS_IN_REGISTERS = true;
using Ints = __m512i;
static inline Ints no_ints() { return _mm512_setzero_si512(); }
static inline Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline void store_ints(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
static inline Ints set_ints(int32_t pair) { return _mm512_set1_epi32(pair); }
static inline Vec to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
static inline Ints dot(Ints total, Ints a, Ints b) {
    // Not the intrinsic: with it g++ 12 moves the sums of a tile to the stack and back in every step.
    asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
    return total;
}
template <int I>
static inline Ints nibble_pair(Words w) {
    return _mm512_and_si512(I ? _mm512_srli_epi32(w, 4 * I) : w, _mm512_set1_epi32(0x000f000f));
}
// What pairs of places in the table of doubled 4-bit floats stand for.
static inline Ints table_pair(Ints places) {
    const __m512i table = _mm512_cvtepi8_epi16(_mm256_broadcastsi128_si256(_mm_setr_epi8(QUIRE_E2M1_BYTES(0))));
    return _mm512_permutexvar_epi16(places, table);
}
static inline Ints byte_pair(const uint8_t* low, const uint8_t* high) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low));
    const __m256i both = _mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i*)high), 1);
    const __m512i order = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17,
                                                            16) << 16);
    return _mm512_permutexvar_epi16(order, _mm512_cvtepi8_epi16(both));  // i and 16 + i side by side
}
// The quarters 0, 2, ... or 1, 3, ... of a and then b.
static inline Vec even_quarters(Vec a, Vec b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
static inline Vec odd_quarters(Vec a, Vec b) { return _mm512_shuffle_f32x4(a, b, 0xDD); }
// The lowest 16 bits of each lane of `low` and of `high`.
static inline Vec pair_up(Vec low, Vec high) {
    return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_castps_si512(low),
                                                       _mm512_slli_epi32(_mm512_castps_si512(high), 16)));
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int INT_ROWS = 6, INT_PANELS = 1;
constexpr bool SUMS_IN_REGISTERS = false;
using Ints = __m256i;
static inline Ints no_ints() { return _mm256_setzero_si256(); }
static inline Ints load_ints(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_ints(int32_t* p, Ints v) { _mm256_storeu_si256((__m256i*)p, v); }
static inline Ints set_ints(int32_t pair) { return _mm256_set1_epi32(pair); }
static inline Vec to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
static inline Ints dot(Ints total, Ints a, Ints b) { return _mm256_add_epi32(total, _mm256_madd_epi16(a, b)); }
template <int I>
static inline Ints nibble_pair(Words w) {
    return _mm256_and_si256(I ? _mm256_srli_epi32(w, 4 * I) : w, _mm256_set1_epi32(0x000f000f));
}
static inline Ints table_pair(Ints places) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(QUIRE_E2M1_BYTES(0)));
    return _mm256_srai_epi16(_mm256_slli_epi16(_mm256_shuffle_epi8(table, places), 8), 8);
}
static inline Ints byte_pair(const uint8_t* low, const uint8_t* high) {
    return _mm256_cvtepi8_epi16(
        _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)low), _mm_loadl_epi64((const __m128i*)high)));
}
static inline Vec even_quarters(Vec a, Vec b) { return _mm256_permute2f128_ps(a, b, 0x20); }
static inline Vec odd_quarters(Vec a, Vec b) { return _mm256_permute2f128_ps(a, b, 0x31); }
static inline Vec pair_up(Vec low, Vec high) {
    return _mm256_castsi256_ps(
        _mm256_blend_epi16(_mm256_castps_si256(low), _mm256_slli_epi32(_mm256_castps_si256(high), 16), 0xAA));
}
#else
constexpr int INT_ROWS = 2, INT_PANELS = 1;
constexpr bool SUMS_IN_REGISTERS = false;
struct Ints {
    int32_t x[LANES];
};
template <class F>
static inline Ints each_int(F f) {
    Ints r;
    for (int i = 0; i < LANES; ++i) r.x[i] = f(i);
    return r;
}
static inline int32_t join(int32_t low, int32_t high) { return (int32_t)(((uint32_t)low & 0xffff) | (uint32_t)high << 16); }
static inline Ints no_ints() { return each_int([](int) { return 0; }); }
static inline Ints load_ints(const int32_t* p) { return each_int([&](int i) { return p[i]; }); }
static inline void store_ints(int32_t* p, Ints v) { std::memcpy(p, v.x, sizeof v.x); }
static inline Ints set_ints(int32_t pair) { return each_int([&](int) { return pair; }); }
static inline Vec to_float(Ints v) { return each([&](int i) { return (float)v.x[i]; }); }
static inline Ints dot(Ints total, Ints a, Ints b) {
    return each_int([&](int i) {
        return total.x[i] + (int16_t)a.x[i] * (int16_t)b.x[i] + (a.x[i] >> 16) * (b.x[i] >> 16);
    });
}
template <int I>
static inline Ints nibble_pair(Words w) {
    return each_int([&](int i) { return (int32_t)(w.x[i] >> (4 * I) & 0x000f000f); });
}
static inline Ints table_pair(Ints places) {
    constexpr int8_t TABLE[] = {QUIRE_E2M1_BYTES(0)};
    return each_int([&](int i) { return join(TABLE[places.x[i] & 15], TABLE[places.x[i] >> 16 & 15]); });
}
static inline Ints byte_pair(const uint8_t* low, const uint8_t* high) {
    return each_int([&](int i) { return join((int8_t)low[i], (int8_t)high[i]); });
}
static inline Vec even_quarters(Vec a, Vec) { return a; }
static inline Vec odd_quarters(Vec, Vec b) { return b; }
static inline Vec pair_up(Vec low, Vec high) {
    return each([&](int i) { return lane_from((lane_bits(low.x[i]) & 0xffff) | lane_bits(high.x[i]) << 16); });
}
#endif

// What a row's BLOCK becomes: integers in the low bits of `values`, their unit, and the sums of both halves of them.
struct Rounded {
    Vec values[BLOCK / LANES];
    float scale, low, high;
};

// One row's BLOCK, of which `count` elements are there: the largest becomes LEVELS.
template <int LEVELS>
static inline Rounded rounded(const float* x, int64_t count) {
    constexpr int N = BLOCK / LANES;
    Rounded block;
    Vec most = zero(), total[2] = {zero(), zero()};
    for (int i = 0; i < N; ++i) {
        const int64_t left = count - i * LANES;
        Vec& v = block.values[i];
        v = left >= LANES ? load(x + i * LANES) : left > 0 ? load_part(x + i * LANES, (int)left) : zero();
        most = vmax(most, vmax(v, sub(zero(), v)));
    }
    const float unit = max_lane(most) * (1.0f / LEVELS);
    const float step = unit < 0x1p-126f ? 0x1p-126f : unit;  // its inverse must not overflow
    const Vec inverse = set(1.0f / step);
    for (int i = 0; i < N; ++i) {
        block.values[i] = fma(block.values[i], inverse, set(ROUNDER));
        total[2 * i / N] = add(total[2 * i / N], sub(block.values[i], set(ROUNDER)));
    }
    block.low = QUIRE_NS::sum(total[0]), block.high = QUIRE_NS::sum(total[1]);
    const float all = block.low + block.high;
    block.scale = step + (all - all);  // NaN if anything is not finite: then the sum is NaN, as infinity times zero is
    return block;
}

}  // namespace QUIRE_NS
}  // namespace quire
