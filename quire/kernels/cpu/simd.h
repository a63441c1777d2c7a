// One vector type for every machine: AVX-512, AVX2, or plain C++ that any compiler turns into something.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
namespace quire {
namespace QUIRE_NS {
constexpr int LANES = 16;
constexpr int ROW_TILE = 4, OUT_TILE = 6;
using Vec = __m512;
static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static inline void store_part(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v); }
static inline Vec set(float x) { return _mm512_set1_ps(x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
static inline Vec round_nearest(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vec scale_by_power(Vec v, Vec n) {  // v * 2^n for integral n
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
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
static inline Vec load_part(const float* p, int n) { return _mm256_maskload_ps(p, part_mask(n)); }
static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static inline void store_part(float* p, Vec v, int n) { _mm256_maskstore_ps(p, part_mask(n), v); }
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
static inline Vec round_nearest(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vec scale_by_power(Vec v, Vec n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
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
static inline Vec round_nearest(Vec v) { return each([&](int i) { return std::nearbyint(v.x[i]); }); }
static inline Vec scale_by_power(Vec v, Vec n) { return each([&](int i) { return std::ldexp(v.x[i], (int)n.x[i]); }); }
}  // namespace QUIRE_NS
}  // namespace quire
#endif

namespace quire {
namespace QUIRE_NS {
// exp by range reduction to [-ln2/2, ln2/2] and a polynomial (the Taylor terms up to r^7, whose rest is below half a
// unit in the last place there). Arguments below -87 count as -87, which is 1.6e-38; above 88 the result is infinite;
// NaN is passed on.
static inline Vec exp(Vec x) {
    const Vec low = set(-87.0f), high = set(88.0f);
    const Vec bounded = vmax(vmin(high, x), low);  // the bound first: a NaN in the second place is kept
    const Vec n = round_nearest(mul(bounded, set(1.44269504f)));
    Vec r = fma(n, set(-0.693359375f), bounded);
    r = fma(n, set(2.12194440e-4f), r);
    Vec p = set(1.0f / 5040);
    p = fma(p, r, set(1.0f / 720));
    p = fma(p, r, set(1.0f / 120));
    p = fma(p, r, set(1.0f / 24));
    p = fma(p, r, set(1.0f / 6));
    p = fma(p, r, set(0.5f));
    p = fma(p, r, set(1.0f));
    p = fma(p, r, set(1.0f));
    const Vec beyond = vmax(zero(), sub(x, high));
    return mul(scale_by_power(p, n), fma(beyond, set(1e38f), set(1.0f)));
}
}  // namespace QUIRE_NS
}  // namespace quire
