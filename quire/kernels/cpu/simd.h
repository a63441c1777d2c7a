// One vector type for every machine: AVX-512, AVX2, or plain C++ that any compiler turns into something.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace quire {
namespace QUIRE_NS {
// The address sanitizer does not see masked accesses: it is shown their ends.
static inline void show_part(const float* p, int n) {
#ifdef __SANITIZE_ADDRESS__
    if (n > 0) (void)*(const volatile float*)p, (void)*(const volatile float*)(p + n - 1);
#else
    (void)p, (void)n;
#endif
}
}  // namespace QUIRE_NS
}  // namespace quire

#if defined(__AVX512F__)
#include <immintrin.h>
namespace quire {
namespace QUIRE_NS {
constexpr int LANES = 16;
constexpr int ROW_TILE = 4, OUT_TILE = 6;
using Vec = __m512;
static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec load_part(const float* p, int n) {
    show_part(p, n);
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static inline void store_part(float* p, Vec v, int n) {
    show_part(p, n);
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
}
static inline Vec set(float x) { return _mm512_set1_ps(x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
static inline float max_lane(Vec v) { return _mm512_reduce_max_ps(v); }
static inline bool any_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0; }
static inline Vec only_lanes(Vec v, int low, int high, Vec other) {  // lanes [low, high) of v, the rest of `other`
    return _mm512_mask_mov_ps(other, (__mmask16)(((1u << high) - 1) & ~((1u << low) - 1)), v);
}
static inline Vec load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_half(uint16_t* p, Vec v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Vec load_brain(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline Vec load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline Vec load_e4m3(const uint8_t* p) {  // 8-bit floats, divided by 256; NaN becomes 480 / 256
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbfff)));
}
static inline Vec add_exponent(Vec v, Vec n) {  // v * 2^n, n being the lowest bits of its lanes
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
static inline void transpose(Vec* v) {  // [LANES][LANES]: within quarters of four rows, then the quarters
    Vec part[4][4];
    for (int g = 0; g < 4; ++g) {
        const Vec* p = v + 4 * g;
        const Vec a = _mm512_unpacklo_ps(p[0], p[1]), b = _mm512_unpackhi_ps(p[0], p[1]);
        const Vec c = _mm512_unpacklo_ps(p[2], p[3]), d = _mm512_unpackhi_ps(p[2], p[3]);
        part[g][0] = _mm512_shuffle_ps(a, c, 0x44), part[g][1] = _mm512_shuffle_ps(a, c, 0xEE);
        part[g][2] = _mm512_shuffle_ps(b, d, 0x44), part[g][3] = _mm512_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        const Vec p = part[0][i], q = part[1][i], r = part[2][i], s = part[3][i];
        const Vec a = _mm512_shuffle_f32x4(p, q, 0x44), b = _mm512_shuffle_f32x4(p, q, 0xEE);
        const Vec c = _mm512_shuffle_f32x4(r, s, 0x44), d = _mm512_shuffle_f32x4(r, s, 0xEE);
        v[i] = _mm512_shuffle_f32x4(a, c, 0x88), v[4 + i] = _mm512_shuffle_f32x4(a, c, 0xDD);
        v[8 + i] = _mm512_shuffle_f32x4(b, d, 0x88), v[12 + i] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
}
}  // namespace QUIRE_NS
}  // namespace quire
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
namespace quire {
namespace QUIRE_NS {
constexpr int LANES = 8;
constexpr int ROW_TILE = 4, OUT_TILE = 3;
using Vec = __m256;
static inline __m256i part_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec load_part(const float* p, int n) {
    show_part(p, n);
    return _mm256_maskload_ps(p, part_mask(n));
}
static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static inline void store_part(float* p, Vec v, int n) {
    show_part(p, n);
    _mm256_maskstore_ps(p, part_mask(n), v);
}
static inline Vec set(float x) { return _mm256_set1_ps(x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline float sum(Vec v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
static inline bool any_equal(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) != 0; }
static inline float max_lane(Vec v) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
static inline Vec only_lanes(Vec v, int low, int high, Vec other) {
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_andnot_si256(part_mask(low), part_mask(high))));
}
static inline Vec load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_half(uint16_t* p, Vec v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Vec load_brain(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline Vec load_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline Vec load_e4m3(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((int16_t)0xbfff)));
}
static inline Vec add_exponent(Vec v, Vec n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
static inline void transpose(Vec* v) {
    Vec part[2][4];
    for (int g = 0; g < 2; ++g) {
        const Vec* p = v + 4 * g;
        const Vec a = _mm256_unpacklo_ps(p[0], p[1]), b = _mm256_unpackhi_ps(p[0], p[1]);
        const Vec c = _mm256_unpacklo_ps(p[2], p[3]), d = _mm256_unpackhi_ps(p[2], p[3]);
        part[g][0] = _mm256_shuffle_ps(a, c, 0x44), part[g][1] = _mm256_shuffle_ps(a, c, 0xEE);
        part[g][2] = _mm256_shuffle_ps(b, d, 0x44), part[g][3] = _mm256_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_permute2f128_ps(part[0][i], part[1][i], 0x20);
        v[4 + i] = _mm256_permute2f128_ps(part[0][i], part[1][i], 0x31);
    }
}
}  // namespace QUIRE_NS
}  // namespace quire
#else
namespace quire {
namespace QUIRE_NS {
constexpr int LANES = 4;
constexpr int ROW_TILE = 2, OUT_TILE = 2;
struct Vec {
    float x[LANES];
};
template <class F>
static inline Vec each(F f) {
    Vec r;
    for (int i = 0; i < LANES; ++i) r.x[i] = f(i);
    return r;
}
static inline Vec zero() { return each([](int) { return 0.0f; }); }
static inline Vec load(const float* p) { return each([&](int i) { return p[i]; }); }
static inline Vec load_part(const float* p, int n) { return each([&](int i) { return i < n ? p[i] : 0.0f; }); }
static inline void store(float* p, Vec v) { std::memcpy(p, v.x, sizeof v.x); }
static inline void store_part(float* p, Vec v, int n) { std::memcpy(p, v.x, sizeof(float) * n); }
static inline Vec set(float x) { return each([&](int) { return x; }); }
static inline Vec fma(Vec a, Vec b, Vec c) { return each([&](int i) { return std::fma(a.x[i], b.x[i], c.x[i]); }); }
static inline Vec add(Vec a, Vec b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
static inline Vec sub(Vec a, Vec b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
static inline Vec mul(Vec a, Vec b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
static inline Vec div(Vec a, Vec b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
static inline Vec vmin(Vec a, Vec b) { return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
static inline Vec vmax(Vec a, Vec b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
static inline float sum(Vec v) { return (v.x[0] + v.x[2]) + (v.x[1] + v.x[3]); }
static inline bool any_equal(Vec a, Vec b) {
    for (int i = 0; i < LANES; ++i)
        if (a.x[i] == b.x[i]) return true;
    return false;
}
static inline float max_lane(Vec v) {
    float most = v.x[0];
    for (int i = 1; i < LANES; ++i) most = v.x[i] > most ? v.x[i] : most;
    return most;
}
static inline Vec only_lanes(Vec v, int low, int high, Vec other) {
    return each([&](int i) { return i >= low && i < high ? v.x[i] : other.x[i]; });
}
static inline float lane_from(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t lane_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float half_lane(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF;
    if (rest >= 0x7C00) return lane_from(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest < 0x400) return lane_from(sign | lane_bits((float)rest * 0x1p-24f));
    return lane_from(sign | ((rest << 13) + ((127 - 15) << 23)));
}
static inline uint16_t lane_half(float value) {  // to nearest even, as processors do
    const uint32_t bits = lane_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (rest >> 13 & 0x3FF));
    if (rest >= 0x477FF000) return (uint16_t)(sign | 0x7C00);
    // Below the smallest normal half an addition aligns the bits, and rounds them as it does.
    if (rest < 0x38800000) return (uint16_t)(sign | (lane_bits(lane_from(rest) + 0.5f) - 0x3F000000));
    return (uint16_t)(sign | (rest - ((127 - 15) << 23) + 0xFFF + (rest >> 13 & 1)) >> 13);
}
static inline Vec load_half(const uint16_t* p) { return each([&](int i) { return half_lane(p[i]); }); }
static inline void store_half(uint16_t* p, Vec v) {
    for (int i = 0; i < LANES; ++i) p[i] = lane_half(v.x[i]);
}
static inline Vec load_brain(const uint16_t* p) { return each([&](int i) { return lane_from((uint32_t)p[i] << 16); }); }
static inline Vec load_int8(const int8_t* p) { return each([&](int i) { return (float)p[i]; }); }
static inline Vec load_e4m3(const uint8_t* p) {
    return each([&](int i) { return half_lane((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)); });
}
static inline Vec add_exponent(Vec v, Vec n) {
    return each([&](int i) { return lane_from(lane_bits(v.x[i]) + (lane_bits(n.x[i]) << 23)); });
}
static inline void transpose(Vec* v) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = v[i].x[j];
            v[i].x[j] = v[j].x[i], v[j].x[i] = kept;
        }
}
}  // namespace QUIRE_NS
}  // namespace quire
#endif

namespace quire {
namespace QUIRE_NS {
// Added to a float of less than 2^22, it leaves that number, rounded, in the lowest bits.
constexpr float ROUNDER = 0x1.8p23f;

// exp by range reduction to [-ln2/2, ln2/2] and a polynomial, whose error of 2e-9 is far below a unit in the last place.
// Arguments below -87 count as -87, which is 1.6e-38; above 88 the result is infinite; NaN is passed on.
static inline Vec exp(Vec x) {
    const Vec low = set(-87.0f), high = set(88.0f);
    const Vec bounded = vmax(low, vmin(high, x));  // the bound first: a NaN in the second place is kept
    const Vec shifted = fma(bounded, set(1.44269504f), set(ROUNDER));
    const Vec n = sub(shifted, set(ROUNDER));
    Vec r = fma(n, set(-0.693359375f), bounded);
    r = fma(n, set(2.12194440e-4f), r);
    Vec p = set(0.0013843635f);
    p = fma(p, r, set(0.00837417133f));
    p = fma(p, r, set(0.0416680016f));
    p = fma(p, r, set(0.166664317f));
    p = fma(p, r, set(0.49999994f));
    p = fma(p, r, set(1.0f));
    p = fma(p, r, set(1.0f));
    const Vec beyond = vmax(zero(), sub(x, high));
    return mul(add_exponent(p, shifted), fma(beyond, set(1e38f), set(1.0f)));
}

// 2^x for x <= 0, with a relative error of 2e-7; at least 2^-126. NaN is passed on.
static inline Vec exp2_below(Vec x) {
    const Vec bounded = vmax(set(-126.0f), x), shifted = add(bounded, set(ROUNDER));
    const Vec r = sub(bounded, sub(shifted, set(ROUNDER)));
    Vec p = fma(set(0.00132647273f), r, set(0.009671513f));
    p = fma(p, r, set(0.0555073358f));
    p = fma(p, r, set(0.240222424f));
    p = fma(p, r, set(0.693147004f));
    p = fma(p, r, set(1.0f));
    return add_exponent(p, shifted);
}

// A sum in 16 lanes whatever the machine's are, so that its bits depend on no instruction set: lane i adds the elements
// i, i + 16, ...; then halves are added to halves.
struct Sum16 {
    static constexpr int PARTS = 16 / LANES;
    Vec part[PARTS];
    Sum16() {
        for (int i = 0; i < PARTS; ++i) part[i] = zero();
    }
    float total() const {
        Vec v[PARTS];
        for (int i = 0; i < PARTS; ++i) v[i] = part[i];
        for (int half = PARTS / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) v[i] = add(v[i], v[i + half]);
        return sum(v[0]);
    }
};
}  // namespace QUIRE_NS
}  // namespace quire
