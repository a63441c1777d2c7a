// Gumbel noise, specified bit by bit in quire/ops/gumbel.py.
//
// Loops are plain, for the compiler to turn into vectors: none of their operations may be fused or reordered.
#pragma once
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int COUNTERS = 64;           // of the random generator at a time
constexpr int WORDS = 4 * COUNTERS;    // that they give, each a token's
constexpr float MOST_NOISE = 22.9f, LEAST_NOISE = -2.9f;  // rounded outwards

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline int32_t int_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Ten rounds of Philox: the words of tokens 4 * blocks[i] to 4 * blocks[i] + 3.
void random_words(const uint32_t* blocks, uint64_t seed, uint64_t position, uint32_t* words) {
    uint32_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
    for (int i = 0; i < COUNTERS; ++i) {
        c0[i] = blocks[i];
        c1[i] = (uint32_t)position;
        c2[i] = (uint32_t)(position >> 32);
        c3[i] = 0x47554D42;
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < COUNTERS; ++i) {
            const uint64_t p0 = (uint64_t)0xD2511F53 * c0[i], p1 = (uint64_t)0xCD9E8D57 * c2[i];
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int i = 0; i < COUNTERS; ++i) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

inline float log_of(int32_t exponent, float f) {
    float q = f * 0.0897943452000618f + -0.14426842331886292f;
    q = q * f + 0.14883700013160706f;
    q = q * f + -0.16551794111728668f;
    q = q * f + 0.19963476061820984f;
    q = q * f + -0.25002583861351013f;
    q = q * f + 0.3333393335342407f;
    q = q * f + -0.4999998211860657f;
    q = q * f * f + f;
    return q + (float)exponent * 0.693147182464599609375f;
}

constexpr int32_t SQRT_HALF = 0x3F3504F3;

// scores[i] becomes logits[i] plus the noise that words[i] gives.
void add_noise(const float* logits, const uint32_t* words, float* scores) {
    for (int i = 0; i < WORDS; ++i) {
        const float v = ((float)words[i] + 0.5f) * 0x1p-32f;
        float u = 1.0f - v;
        u = u > 0x1p-25f ? u : 0x1p-25f;
        const int32_t bits = int_of(u) - SQRT_HALF;
        const int32_t exponent = bits >> 23;
        const float f = exponent == 0 ? -v : float_of((uint32_t)((bits & 0x7FFFFF) + SQRT_HALF)) - 1.0f;
        const float exponential = -log_of(exponent, f);
        const int32_t again = int_of(exponential) - SQRT_HALF;
        const float g = float_of((uint32_t)((again & 0x7FFFFF) + SQRT_HALF)) - 1.0f;
        scores[i] = -log_of(again >> 23, g) + logits[i];
    }
}

}  // namespace
}  // namespace QUIRE_NS
}  // namespace quire
