// The draw of a token within temperature, min_p, top_k and top_p: see ops/draw_within.py, whose tokens it gives.
//
// The tokens that may be drawn are found first, and noise is made for them alone. Those that cannot matter, being too far
// below the likeliest one, are never looked at twice.
#include "noise.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr float ONE = 1099511627776.0f;  // 2^40: weights are multiples of its inverse
// How far below the likeliest token, in units of the scaled logits, others are looked for, until enough are found. From the
// last but one on they weigh nothing: e^-28 * 2^40 < 1.
constexpr float DEPTHS[] = {4.0f, 7.0f, 10.0f, 14.0f, 28.0f, INFINITY};
constexpr int NO_WEIGHT = 4, EVERYTHING = 5;
constexpr float LOWEST = -3.4028234e38f;
constexpr int STEP = 64;

struct Limits {
    float temperature, log_min_p;
    int64_t top_k;  // 0: none
    double top_p;   // 1: none
    bool has_k(int64_t size) const { return top_k > 0 && top_k < size; }
    bool has_p() const { return top_p < 1.0; }
};

// Tokens in order of their ids; `scaled` are their logits divided by the temperature.
struct Tokens {
    float* scaled;
    int32_t* ids;
    int64_t* weights;
    int64_t count;
};

// Finds the tokens whose scaled logit is at least `floor`.
struct Above {
    const float* logits;
    int64_t size;
    float temperature, floor, rough;
    Above(const float* logits, int64_t size, float temperature, float floor)
        : logits(logits), size(size), temperature(temperature), floor(floor) {
        // Divisions are slow; what is below this cannot be above the floor after one.
        const float product = floor * temperature;
        rough = floor > LOWEST ? product - (std::fabs(product) * 1e-6f + 1e-30f) : -INFINITY;
    }
    int64_t count(int64_t first) const {  // of the STEP tokens from `first` on, or more
        if (size - first < STEP) return STEP;
        int found = 0;
        for (int i = 0; i < STEP; ++i) found += logits[first + i] > rough;
        return found;
    }
    // The scaled logits of n tokens; -inf below the floor.
    void scale(int64_t first, int64_t n, float* scaled) const {
        for (int64_t i = 0; i < n; ++i) {
            const float value = logits[first + i] / temperature;
            scaled[i] = value >= floor ? value : -INFINITY;
        }
    }
};

void collect(const Above& above, Tokens& tokens) {
    int64_t count = 0;
    for (int64_t first = 0; first < above.size; first += STEP) {
        if (above.count(first) == 0) continue;
        const int64_t end = first + STEP < above.size ? first + STEP : above.size;
        for (int64_t i = first; i < end; ++i) {
            if (!(above.logits[i] > above.rough)) continue;
            const float scaled = above.logits[i] / above.temperature;
            tokens.scaled[count] = scaled;
            tokens.ids[count] = (int32_t)i;
            count += scaled >= above.floor;
        }
    }
    tokens.count = count;
}

// e to the power of scaled - top, in multiples of 2^-40; of at most STEP tokens.
inline void weigh_some(const float* scaled, int64_t n, float top, int64_t* weights) {
    float powers[STEP];
    map(n, [&](int64_t i, int lanes) {
        put(powers + i, mul(exp(sub(get(scaled + i, lanes), set(top))), set(ONE)), lanes);
    });
    for (int64_t i = 0; i < n; ++i) weights[i] = (int64_t)powers[i];
}

void weigh(const float* scaled, int64_t count, float top, int64_t* weights) {
    for (int64_t first = 0; first < count; first += STEP)
        weigh_some(scaled + first, count - first < STEP ? count - first : STEP, top, weights + first);
}

int64_t sum_of(const int64_t* weights, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += weights[i];
    return total;
}

// The weight of all tokens, and of those at each of DEPTHS before NO_WEIGHT.
int64_t weight_above(const Above& above, float top, int64_t* at_depth) {
    int64_t total = 0;
    for (int d = 0; d < NO_WEIGHT; ++d) at_depth[d] = 0;
    for (int64_t first = 0; first < above.size; first += STEP) {
        if (above.count(first) == 0) continue;
        float scaled[STEP];
        int64_t weights[STEP];
        const int64_t n = above.size - first < STEP ? above.size - first : STEP;
        above.scale(first, n, scaled);
        weigh_some(scaled, n, top, weights);
        total += sum_of(weights, n);
        for (int d = 0; d < NO_WEIGHT; ++d) {
            const float least = top - DEPTHS[d];
            int64_t part = 0;
            for (int64_t i = 0; i < n; ++i) part += scaled[i] >= least ? weights[i] : 0;
            at_depth[d] += part;
        }
    }
    return total;
}

// A float's place in the order, the highest first; equal floats, also 0 and -0, have the same.
inline uint32_t rank_of(float value) {
    const int32_t bits = int_of(value + 0.0f);
    return 0x7FFFFFFFu - (uint32_t)(bits ^ ((bits >> 31) & 0x7FFFFFFF));
}

// Keep the shortest prefix, in the order of higher logits and then lower ids, whose weights reach `needed`. A radix select
// of the last value that is kept; its equals are kept while something is still needed.
template <class Weight>
void keep_prefix(Tokens& tokens, int64_t needed, const Weight& weight_of) {
    constexpr int SHIFTS[] = {21, 10, 0}, BITS[] = {11, 11, 10};
    uint32_t last = 0;
    for (int pass = 0; pass < 3; ++pass) {
        int64_t masses[2048] = {};
        const uint32_t mask = (1u << BITS[pass]) - 1;
        const int above = SHIFTS[pass] + BITS[pass];
        for (int64_t i = 0; i < tokens.count; ++i) {
            const uint32_t rank = rank_of(tokens.scaled[i]);
            if (pass && rank >> above != last >> above) continue;
            masses[rank >> SHIFTS[pass] & mask] += weight_of(i);
        }
        uint32_t at = 0;
        for (; at < mask && masses[at] < needed; ++at) needed -= masses[at];
        last |= at << SHIFTS[pass];
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < tokens.count; ++i) {
        const uint32_t rank = rank_of(tokens.scaled[i]);
        if (rank > last || (rank == last && needed <= 0)) continue;
        if (rank == last) needed -= weight_of(i);
        tokens.scaled[kept] = tokens.scaled[i];
        tokens.ids[kept++] = tokens.ids[i];
    }
    tokens.count = kept;
}

int64_t needed_of(int64_t total, double top_p) {
    const int64_t needed = (int64_t)__builtin_ceil((double)total * top_p);
    return needed < 1 ? 1 : needed;
}

// Leave what top_k and top_p let be drawn. `lowest` is min_p's limit.
void apply_limits(const float* logits, int64_t size, const Limits& limits, float top, float lowest, Tokens& tokens) {
    const auto above = [&](int d) {
        const float floor = top - DEPTHS[d];
        return Above(logits, size, limits.temperature, floor > lowest ? floor : lowest);
    };
    if (limits.has_k(size)) {
        for (int d = 0; d <= EVERYTHING; ++d) {
            collect(above(d), tokens);
            if (tokens.count >= limits.top_k) break;
        }
        if (tokens.count > limits.top_k) keep_prefix(tokens, limits.top_k, [](int64_t) { return (int64_t)1; });
        if (!limits.has_p()) return;
    }
    int64_t needed;
    if (limits.has_k(size)) {
        weigh(tokens.scaled, tokens.count, top, tokens.weights);
        needed = needed_of(sum_of(tokens.weights, tokens.count), limits.top_p);
    } else {
        int64_t at_depth[NO_WEIGHT];
        needed = needed_of(weight_above(above(NO_WEIGHT), top, at_depth), limits.top_p);
        int d = 0;
        while (d < NO_WEIGHT && at_depth[d] < needed) ++d;
        collect(above(d), tokens);
        weigh(tokens.scaled, tokens.count, top, tokens.weights);
    }
    keep_prefix(tokens, needed, [&](int64_t i) { return tokens.weights[i]; });
}

// The first highest of logit plus noise.
int32_t best_of(const Tokens& tokens, uint64_t seed, uint64_t position) {
    uint32_t blocks[COUNTERS] = {}, words[WORDS], mine[WORDS] = {};
    float logits[WORDS] = {}, scores[WORDS], best = -INFINITY;
    uint16_t places[WORDS];
    int32_t found = tokens.ids[0];
    for (int64_t first = 0; first < tokens.count;) {
        // As many tokens as these counters give words for.
        int used = 0, count = 0;
        for (; first + count < tokens.count && count < WORDS; ++count) {
            const uint32_t id = (uint32_t)tokens.ids[first + count];
            if (!used || blocks[used - 1] != id / 4) {
                if (used == COUNTERS) break;
                blocks[used++] = id / 4;
            }
            places[count] = (uint16_t)(4 * (used - 1) + id % 4);
            logits[count] = tokens.scaled[first + count];
        }
        random_words(blocks, seed, position, words);
        for (int i = 0; i < count; ++i) mine[i] = words[places[i]];
        add_noise(logits, mine, scores);
        for (int i = 0; i < count; ++i)
            if (scores[i] > best) best = scores[i], found = tokens.ids[first + i];
        first += count;
    }
    return found;
}

// The same of all tokens above a floor, which are many.
int32_t best_of_many(const Above& above, uint64_t seed, uint64_t position) {
    uint32_t blocks[COUNTERS], words[WORDS];
    float logits[WORDS] = {}, scores[WORDS], best = -INFINITY;
    int32_t found = 0;
    for (int64_t first = 0; first < above.size; first += WORDS) {
        const int64_t n = above.size - first < WORDS ? above.size - first : WORDS;
        above.scale(first, n, logits);
        for (int i = 0; i < COUNTERS; ++i) blocks[i] = (uint32_t)(first / 4 + i);
        random_words(blocks, seed, position, words);
        add_noise(logits, words, scores);
        for (int64_t i = 0; i < n; ++i)
            if (scores[i] > best) best = scores[i], found = (int32_t)(first + i);
    }
    return found;
}

int32_t draw_row(const float* logits, int64_t size, float highest, const Limits& limits, uint64_t seed,
                 uint64_t position) {
    const float top = highest / limits.temperature, by_min_p = top + limits.log_min_p;
    const float lowest = by_min_p > LOWEST ? by_min_p : LOWEST;
    Tokens tokens;
    tokens.scaled = (float*)scratch(1, sizeof(float) * size);
    tokens.ids = (int32_t*)scratch(2, sizeof(int32_t) * size);
    tokens.weights = (int64_t*)scratch(3, sizeof(int64_t) * size);
    if (limits.has_k(size) || limits.has_p()) {
        apply_limits(logits, size, limits, top, lowest, tokens);
        return best_of(tokens, seed, position);
    }
    // With the least noise for the likeliest token and the most for another, this one still loses.
    const float hopeless = top - (MOST_NOISE - LEAST_NOISE) - 1e-6f * std::fabs(top);
    const Above above(logits, size, limits.temperature, hopeless > lowest ? hopeless : lowest);
    int64_t count = 0;
    for (int64_t first = 0; first < size; first += STEP) count += above.count(first);
    if (count > size / 4) return best_of_many(above, seed, position);
    collect(above, tokens);
    return best_of(tokens, seed, position);
}

}  // namespace

void draw_within(const float* logits, const double* parameters, const int64_t* seeds, const int64_t* positions,
                 int64_t rows, int64_t size, int64_t stride, int32_t* tokens, float* highest) {
    int64_t* likeliest = (int64_t*)scratch(4, sizeof(int64_t) * rows);
    first_max(logits, rows, size, stride, likeliest, highest);
    parallel(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const Limits limits{(float)parameters[r], (float)parameters[rows + r], (int64_t)parameters[2 * rows + r],
                                parameters[3 * rows + r]};
            tokens[r] = (int32_t)likeliest[r];
            if (highest[r] != highest[r]) highest[r] = INFINITY;
            if (limits.temperature == 0.0f || !__builtin_isfinite(highest[r] / limits.temperature)) continue;
            tokens[r] = draw_row(logits + r * stride, size, highest[r], limits, (uint64_t)seeds[r],
                                 (uint64_t)positions[r]);
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
