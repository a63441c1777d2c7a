// The choice of a token: the first highest score, plain or with Gumbel noise. Exact, so in any order of work the same.
//
// The noise is specified bit by bit in quire/ops/gumbel.py. Loops over WIDTH elements are plain, for the compiler to
// turn into vectors: none of their operations may be fused or reordered.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t CHUNK = 8192;  // tokens of a row that one thread takes at a time; a multiple of WIDTH
constexpr int WIDTH = 256;

struct Best {
    float score;
    int64_t index;
};

// The better of two, of which `later` has higher indices. NaN wins, so that it is not hidden.
inline Best better(Best first, Best later) {
    if (first.score != first.score) return first;
    return later.score > first.score || later.score != later.score ? later : first;
}

// The first of the highest of `count` scores.
Best find_best(const float* scores, int64_t count) {
    Vec most = set(-INFINITY), broken = zero();
    map(count, [&](int64_t i, int n) {
        float lanes[LANES];
        if (n < LANES)
            for (int k = 0; k < LANES; ++k) lanes[k] = scores[i + (k < n ? k : 0)];
        const Vec v = load(n < LANES ? lanes : scores + i);
        broken = add(broken, mul(v, zero()));  // NaN if v is, but also if it is infinite
        most = vmax(v, most);
    });
    const float highest = max_lane(most);
    const float sign = sum(broken);
    if (sign != sign)
        for (int64_t i = 0; i < count; ++i)
            if (scores[i] != scores[i]) return {scores[i], i};
    int64_t i = 0;
    const Vec wanted = set(highest);
    while (i + LANES <= count && !any_equal(load(scores + i), wanted)) i += LANES;
    while (i < count && scores[i] != highest) ++i;
    return {highest, i};
}

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

// Ten rounds of Philox for WIDTH / 4 counters that differ in their first word.
void random_words(uint32_t first_block, uint64_t seed, uint64_t position, uint32_t* words) {
    constexpr int N = WIDTH / 4;
    uint32_t c0[N], c1[N], c2[N], c3[N];
    for (int i = 0; i < N; ++i) {
        c0[i] = first_block + (uint32_t)i;
        c1[i] = (uint32_t)position;
        c2[i] = (uint32_t)(position >> 32);
        c3[i] = 0x47554D42;
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < N; ++i) {
            const uint64_t p0 = (uint64_t)0xD2511F53 * c0[i], p1 = (uint64_t)0xCD9E8D57 * c2[i];
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int i = 0; i < N; ++i) {
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

// scores = logits + noise of the tokens from `first` (a multiple of 4) on.
void add_noise(const float* logits, uint32_t first, uint64_t seed, uint64_t position, float* scores) {
    uint32_t words[WIDTH];
    random_words(first / 4, seed, position, words);
    for (int i = 0; i < WIDTH; ++i) {
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

// f(row, first token, count) -> Best with an index relative to the first token; over all rows, in chunks, on all threads.
template <class F>
void choose(int64_t rows, int64_t size, int64_t* ids, float* scores, const F& f) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
    Best* found = (Best*)scratch(0, sizeof(Best) * rows * chunks);
    parallel(rows * chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % chunks * CHUNK, count = size - first < CHUNK ? size - first : CHUNK;
            found[i] = f(i / chunks, first, count);
            found[i].index += first;
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        Best best = found[r * chunks];
        for (int64_t c = 1; c < chunks; ++c) best = better(best, found[r * chunks + c]);
        ids[r] = best.index;
        if (scores) scores[r] = best.score;
    }
}

}  // namespace

void first_max(const float* scores, int64_t rows, int64_t size, int64_t stride, int64_t* ids, float* best) {
    choose(rows, size, ids, best, [&](int64_t row, int64_t first, int64_t count) {
        return find_best(scores + row * stride + first, count);
    });
}

void draw(const float* logits, const int64_t* seeds, const int64_t* positions, int64_t rows, int64_t size,
          int64_t stride, int64_t* ids) {
    choose(rows, size, ids, nullptr, [&](int64_t row, int64_t first, int64_t count) {
        const float* line = logits + row * stride + first;
        float* noisy = (float*)scratch(1, sizeof(float) * CHUNK);
        const uint64_t seed = (uint64_t)seeds[row], position = (uint64_t)positions[row];
        for (int64_t i = 0; i < count; i += WIDTH) {
            if (count - i >= WIDTH) {
                add_noise(line + i, (uint32_t)(first + i), seed, position, noisy + i);
                continue;
            }
            float rest[WIDTH] = {}, out[WIDTH];
            std::memcpy(rest, line + i, sizeof(float) * (count - i));
            add_noise(rest, (uint32_t)(first + i), seed, position, out);
            std::memcpy(noisy + i, out, sizeof(float) * (count - i));
        }
        return find_best(noisy, count);
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
