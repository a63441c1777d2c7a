// How weights are kept: panels of 16 outputs, in which element k of the 16 outputs lies side by side. Matmuls multiply
// them by one broadcast element of x at a time, so each output is summed over k in order, and no sum crosses lanes.
//
// A panel is [scales][codes]. Codes are floats, or integers that become w = fma(code, scale, minimum) with a scale and
// perhaps a minimum per output and group of k. Scales are floats, or integers of 8 bits, of which those of WHOLE elements
// are multiplied by a half that stands before them, and the minima by another. The inner size is padded with zeros to a
// multiple of BLOCK.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

constexpr int PANEL = 16;  // outputs
constexpr int BLOCK = 32;  // elements along k
constexpr int WHOLE = 256;  // elements along k whose integer scales share a factor
constexpr int VECS = PANEL / LANES;

// The numbers are those of matrix.py.
enum Format : int64_t {
    FLOAT32 = 0,
    BFLOAT16 = 1,     // per output a word of elements 2i (low half) and 2i + 1
    FLOAT16 = 2,
    CODE4 = 3,         // per output a word of 8 elements, the first in the low bits; f16 scale; code - 8
    CODE4_MIN = 4,     // f16 scale and minimum
    CODE4_MIN_F32 = 5, // f32 scale and minimum
    CODE8 = 6,         // f16 scale
    CODE8_MIN = 7,
    CODE8_MIN_F32 = 8,
    CODE8_F32 = 9,     // f32 scale for each 16 elements
    CODE4_MIN_16 = 10, // f32 scale and minimum for each 16
    E2M1 = 11,         // 4-bit floats, doubled; from here on scales are f32
    E2M1_16 = 12,      // the same, a scale for each 16
    NF4 = 13,
    FP4 = 14,
    E4M3 = 15,  // 8-bit floats, divided by 256
    E5M2 = 16,
    CODE4_MIN_K = 17,  // the types K of GGUF: integer scales and minima
    CODE8_MIN_K = 18,
    CODE8_K = 19,  // an integer scale for each 16
    CODE8_32 = 20,  // f32 scale
    NUM_FORMATS = 21,
};

// What codes are places in.
enum ValueTable { NO_TABLE, DOUBLED_E2M1, NORMAL_FLOAT4, FLOAT4 };
alignas(64) constexpr float TABLES[][16] = {
    {},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f, 0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,
     -0.0f, -0.0052083334885537624f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f,
     -0.25f},
};

struct Layout {
    int bits;         // of a code
    int step;         // elements along k that are loaded at a time
    int group;        // elements along k that share a scale
    int scale_bytes;  // of one scale or minimum; 0 if there are none, 1 if they are integers
    bool has_min;
    int zero;          // the code that means 0
    ValueTable table;  // of values that codes stand for

    constexpr int scales_per_group() const { return scale_bytes * PANEL * (has_min ? 2 : 1); }
    constexpr int64_t padded(int64_t inner) const { return (inner + BLOCK - 1) / BLOCK * BLOCK; }
    constexpr int factor_bytes() const { return scale_bytes == 1 ? 2 * PANEL * (has_min ? 2 : 1) : 0; }
    // Where the scales of element k are, a multiple of `group`, and the factors before them.
    constexpr int64_t scales_at(int64_t k) const {
        return k / group * scales_per_group() + (k / WHOLE + 1) * factor_bytes();
    }
    constexpr int64_t factors_at(int64_t k) const { return k / WHOLE * (factor_bytes() + WHOLE / group * scales_per_group()); }
    constexpr int64_t codes_at(int64_t inner) const {
        const int64_t factors = (padded(inner) + WHOLE - 1) / WHOLE * factor_bytes();
        return (padded(inner) / group * scales_per_group() + factors + 63) / 64 * 64;
    }
    constexpr int64_t panel_bytes(int64_t inner) const { return codes_at(inner) + padded(inner) * bits * PANEL / 8; }
};

constexpr Layout LAYOUTS[NUM_FORMATS] = {
    {32, 1, 32, 0, false, 0, NO_TABLE},
    {16, 2, 32, 0, false, 0, NO_TABLE},
    {16, 1, 32, 0, false, 0, NO_TABLE},
    {4, 8, 32, 2, false, 8, NO_TABLE},
    {4, 8, 32, 2, true, 0, NO_TABLE},
    {4, 8, 32, 4, true, 0, NO_TABLE},
    {8, 1, 32, 2, false, 0, NO_TABLE},
    {8, 1, 32, 2, true, 0, NO_TABLE},
    {8, 1, 32, 4, true, 0, NO_TABLE},
    {8, 1, 16, 4, false, 0, NO_TABLE},
    {4, 8, 16, 4, true, 0, NO_TABLE},
    {4, 8, 32, 4, false, 0, DOUBLED_E2M1},
    {4, 8, 16, 4, false, 0, DOUBLED_E2M1},
    {4, 8, 32, 4, false, 0, NORMAL_FLOAT4},
    {4, 8, 32, 4, false, 0, FLOAT4},
    {8, 1, 32, 4, false, 0, NO_TABLE},
    {8, 1, 32, 4, false, 0, NO_TABLE},
    {4, 8, 32, 1, true, 0, NO_TABLE},
    {8, 1, 32, 1, true, 0, NO_TABLE},
    {8, 1, 16, 1, false, 0, NO_TABLE},
    {8, 1, 32, 4, false, 0, NO_TABLE},
};

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    uint32_t bits = rest + (112u << 23);                    // the exponent's new bias
    if (rest >= 0x0f800000) bits = rest + (224u << 23);     // infinite or not a number
    float value;
    std::memcpy(&value, &bits, 4);
    if (rest < 0x00800000) {                                // subnormal: the hidden bit of 2^-14 is taken off again
        bits = rest + (113u << 23);
        std::memcpy(&value, &bits, 4);
        value -= 6.103515625e-05f;
    }
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The bits of a half that are those of an 8-bit float; of E4M3 it is a 256th.
static inline uint16_t half_of_e4m3(uint8_t code) { return (uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7); }
static inline uint16_t half_of_e5m2(uint8_t code) { return (uint16_t)(code << 8); }

// ---- vectors of LANES outputs from memory, for each instruction set
#if defined(__AVX512F__)
using Words = __m512i;
static inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
static inline Vec load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline Vec load_int8(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
template <int I>
static inline Vec bfloat(Words w) {
    return _mm512_castsi512_ps(I ? _mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(w, 16));
}
template <int I, int ZERO>
static inline Vec nibble(Words w) {
    const Vec table = _mm512_setr_ps(0 - ZERO, 1 - ZERO, 2 - ZERO, 3 - ZERO, 4 - ZERO, 5 - ZERO, 6 - ZERO, 7 - ZERO, 8 - ZERO,
                                     9 - ZERO, 10 - ZERO, 11 - ZERO, 12 - ZERO, 13 - ZERO, 14 - ZERO, 15 - ZERO);
    return _mm512_permutexvar_ps(I ? _mm512_srli_epi32(w, 4 * I) : w, table);  // looks at the low four bits alone
}
template <int I, int TABLE>
static inline Vec looked_up(Words w) {
    return _mm512_permutexvar_ps(I ? _mm512_srli_epi32(w, 4 * I) : w, _mm512_load_ps(TABLES[TABLE]));
}
template <int F>
static inline Vec load_float8(const void* p) {
    if (F == E4M3) return load_e4m3((const uint8_t*)p);
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 8));
}
#elif defined(__AVX2__) && defined(__FMA__)
using Words = __m256i;
static inline Words load_words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Vec load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline Vec load_int8(const void* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
template <int I>
static inline Vec bfloat(Words w) {
    return _mm256_castsi256_ps(I ? _mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(w, 16));
}
template <int I, int ZERO>
static inline Vec nibble(Words w) {
    const __m256i code = _mm256_and_si256(I ? _mm256_srli_epi32(w, 4 * I) : w, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(ZERO ? _mm256_sub_epi32(code, _mm256_set1_epi32(ZERO)) : code);
}
template <int I, int TABLE>
static inline Vec looked_up(Words w) {
    const __m256i place = I ? _mm256_srli_epi32(w, 4 * I) : w;  // the low three bits are looked at
    const Vec low = _mm256_permutevar8x32_ps(_mm256_load_ps(TABLES[TABLE]), place);
    const Vec high = _mm256_permutevar8x32_ps(_mm256_load_ps(TABLES[TABLE] + 8), place);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - 4 * I)));
}
template <int F>
static inline Vec load_float8(const void* p) {
    if (F == E4M3) return load_e4m3((const uint8_t*)p);
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 8));
}
#else
struct Words {
    uint32_t x[LANES];
};
static inline Words load_words(const void* p) {
    Words w;
    std::memcpy(w.x, p, sizeof w.x);
    return w;
}
static inline Vec load_half(const void* p) {
    uint16_t h[LANES];
    std::memcpy(h, p, sizeof h);
    return each([&](int i) { return half_to_float(h[i]); });
}
static inline Vec load_int8(const void* p) { return each([&](int i) { return (float)((const int8_t*)p)[i]; }); }
template <int I>
static inline Vec bfloat(Words w) {
    for (int i = 0; i < LANES; ++i) w.x[i] = I ? w.x[i] & 0xffff0000u : w.x[i] << 16;
    Vec v;
    std::memcpy(v.x, w.x, sizeof v.x);
    return v;
}
template <int I, int ZERO>
static inline Vec nibble(Words w) {
    return each([&](int i) { return (float)((int)(w.x[i] >> (4 * I) & 15) - ZERO); });
}
template <int I, int TABLE>
static inline Vec looked_up(Words w) {
    return each([&](int i) { return TABLES[TABLE][w.x[i] >> (4 * I) & 15]; });
}
template <int F>
static inline Vec load_float8(const void* p) {
    return each([&](int i) {
        const uint8_t code = ((const uint8_t*)p)[i];
        return half_to_float(F == E5M2 ? half_of_e5m2(code) : half_of_e4m3(code));
    });
}
#endif

// ---- from codes to weights
// The scale and minimum of one panel in one group, which begins at element k.
template <int F>
struct Scales {
    Vec scale[VECS], minimum[VECS];

    inline void load_group(const uint8_t* panel, uint64_t k) {
        constexpr Layout L = LAYOUTS[F];
        const uint8_t *p = panel + L.scales_at((int64_t)k), *factors = panel + L.factors_at((int64_t)k);
        for (int v = 0; v < VECS; ++v) {
            if constexpr (L.scale_bytes == 1) scale[v] = mul(load_int8(p + v * LANES), load_half(factors + v * LANES * 2));
            if constexpr (L.has_min && L.scale_bytes == 1)
                minimum[v] = mul(load_int8(p + PANEL + v * LANES), load_half(factors + (PANEL + v * LANES) * 2));
            if constexpr (L.scale_bytes == 2) scale[v] = load_half(p + v * LANES * 2);
            if constexpr (L.scale_bytes == 4) scale[v] = load((const float*)p + v * LANES);
            if constexpr (L.has_min && L.scale_bytes == 2) minimum[v] = load_half(p + (PANEL + v * LANES) * 2);
            if constexpr (L.has_min && L.scale_bytes == 4) minimum[v] = load((const float*)p + PANEL + v * LANES);
        }
    }

    // The same group of the panel that lies `ahead` bytes further on.
    static inline void prefetch(const uint8_t* panel, uint64_t k, int64_t ahead) {
        constexpr Layout L = LAYOUTS[F];
        if constexpr (L.scale_bytes > 0) fetch(panel + ahead + L.scales_at((int64_t)k));
        if constexpr (L.scale_bytes == 1)
            if (k % WHOLE == 0) fetch(panel + ahead + L.factors_at((int64_t)k));
    }
};

// The codes of one panel for `step` elements along k.
template <int F>
struct Codes {
    const uint8_t* p;
    Words words[VECS];

    inline void load_step(const uint8_t* from) {
        constexpr Layout L = LAYOUTS[F];
        p = from;
        if constexpr (L.step > 1)
            for (int v = 0; v < VECS; ++v) words[v] = load_words(from + v * LANES * 4);
    }

    // Weights of element I of the step.
    template <int I>
    inline Vec weight(const Scales<F>& s, int v) const {
        constexpr Layout L = LAYOUTS[F];
        if constexpr (F == FLOAT32) return load((const float*)p + v * LANES);
        if constexpr (F == BFLOAT16) return bfloat<I>(words[v]);
        if constexpr (F == FLOAT16) return load_half(p + v * LANES * 2);
        if constexpr (L.scale_bytes > 0) {
            Vec code;
            if constexpr (L.table != NO_TABLE)
                code = looked_up<I, L.table>(words[v]);
            else if constexpr (L.bits == 4)
                code = nibble<I, L.zero>(words[v]);
            else if constexpr (F == E4M3 || F == E5M2)
                code = load_float8<F>(p + v * LANES);
            else
                code = load_int8(p + v * LANES);
            return L.has_min ? fma(code, s.scale[v], s.minimum[v]) : mul(code, s.scale[v]);
        }
    }
};

template <int F>
constexpr int STEP_BYTES = LAYOUTS[F].step * LAYOUTS[F].bits * PANEL / 8;

// f(std::integral_constant) for 0 .. N - 1, unrolled.
template <int I>
struct Index {
    static constexpr int value = I;
};
template <int N, int I = 0, class F>
static inline __attribute__((always_inline)) void unrolled(const F& f) {
    if constexpr (I < N) {
        f(Index<I>());
        unrolled<N, I + 1>(f);
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
