// The draw of a token within temperature, min_p, top_k and top_p: see ops/sample.py, whose tokens it gives.
//
// The tokens that may be sampled are found first, and noise is made for them alone. Those that cannot matter, being too far
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

// Logits of tokens from `first_id` on.
struct Row {
    const float* logits;
    int64_t size, first_id;
};

// Finds the tokens whose scaled logit is at least `floor`.
struct Above {
    const float* logits;
    int64_t size, first_id;
    float temperature, floor, rough;
    Above(const Row& row, float temperature, float floor)
        : logits(row.logits), size(row.size), first_id(row.first_id), temperature(temperature), floor(floor) {
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
            tokens.ids[count] = (int32_t)(above.first_id + i);
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

void keep_first(Tokens& tokens, int64_t top_k) {
    if (tokens.count > top_k) keep_prefix(tokens, top_k, [](int64_t) { return (int64_t)1; });
}

// Leave what top_p lets be sampled of tokens that are all there are.
void keep_top_p(Tokens& tokens, float top, double top_p) {
    weigh(tokens.scaled, tokens.count, top, tokens.weights);
    const int64_t needed = needed_of(sum_of(tokens.weights, tokens.count), top_p);
    keep_prefix(tokens, needed, [&](int64_t i) { return tokens.weights[i]; });
}

// The row's tokens down to one of DEPTHS, but not under `lowest`.
Above above_depth(const Row& row, float temperature, float top, float lowest, int depth) {
    const float floor = top - DEPTHS[depth];
    return Above(row, temperature, floor > lowest ? floor : lowest);
}

// The first top_k tokens of a row.
void collect_first(const Row& row, const Limits& limits, float top, float lowest, Tokens& tokens) {
    for (int d = 0; d <= EVERYTHING; ++d) {
        collect(above_depth(row, limits.temperature, top, lowest, d), tokens);
        if (tokens.count >= limits.top_k) break;
    }
    keep_first(tokens, limits.top_k);
}

// Leave what top_k and top_p let be sampled. `lowest` is min_p's limit.
void apply_limits(const Row& row, const Limits& limits, float top, float lowest, Tokens& tokens) {
    const auto above = [&](int d) { return above_depth(row, limits.temperature, top, lowest, d); };
    if (limits.has_k(row.size)) {
        collect_first(row, limits, top, lowest, tokens);
        if (limits.has_p()) keep_top_p(tokens, top, limits.top_p);
        return;
    }
    int64_t at_depth[NO_WEIGHT];
    const int64_t needed = needed_of(weight_above(above(NO_WEIGHT), top, at_depth), limits.top_p);
    int d = 0;
    while (d < NO_WEIGHT && at_depth[d] < needed) ++d;
    collect(above(d), tokens);
    weigh(tokens.scaled, tokens.count, top, tokens.weights);
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

// The same of all tokens above a floor, which are many. The row begins with the first word of a counter.
int32_t best_of_many(const Above& above, uint64_t seed, uint64_t position) {
    uint32_t blocks[COUNTERS], words[WORDS];
    float logits[WORDS] = {}, scores[WORDS], best = -INFINITY;
    int32_t found = (int32_t)above.first_id;
    for (int64_t first = 0; first < above.size; first += WORDS) {
        const int64_t n = above.size - first < WORDS ? above.size - first : WORDS;
        above.scale(first, n, logits);
        for (int i = 0; i < COUNTERS; ++i) blocks[i] = (uint32_t)((above.first_id + first) / 4 + i);
        random_words(blocks, seed, position, words);
        add_noise(logits, words, scores);
        for (int64_t i = 0; i < n; ++i)
            if (scores[i] > best) best = scores[i], found = (int32_t)(above.first_id + first + i);
    }
    return found;
}

Tokens room_for(int64_t size) {
    return {(float*)scratch(1, sizeof(float) * size), (int32_t*)scratch(2, sizeof(int32_t) * size),
            (int64_t*)scratch(3, sizeof(int64_t) * size), 0};
}

int32_t draw_row(const Row& row, float highest, const Limits& limits, uint64_t seed, uint64_t position) {
    const float top = highest / limits.temperature, by_min_p = top + limits.log_min_p;
    const float lowest = by_min_p > LOWEST ? by_min_p : LOWEST;
    Tokens tokens = room_for(row.size);
    if (limits.has_k(row.size) || limits.has_p()) {
        apply_limits(row, limits, top, lowest, tokens);
        return best_of(tokens, seed, position);
    }
    // With the least noise for the likeliest token and the most for another, this one still loses.
    const float hopeless = top - (MOST_NOISE - LEAST_NOISE) - 1e-6f * std::fabs(top);
    const Above above(row, limits.temperature, hopeless > lowest ? hopeless : lowest);
    int64_t count = 0;
    for (int64_t first = 0; first < row.size; first += STEP) count += above.count(first);
    if (count > row.size / 4 && row.first_id % 4 == 0) return best_of_many(above, seed, position);
    collect(above, tokens);
    return best_of(tokens, seed, position);
}

Limits limits_of(const double* parameters, int64_t rows, int64_t r) {
    return {(float)parameters[r], (float)parameters[rows + r], (int64_t)parameters[2 * rows + r], parameters[3 * rows + r]};
}

bool is_greedy(const Limits& limits, float highest) {
    return limits.temperature == 0.0f || !__builtin_isfinite(highest / limits.temperature);
}

}  // namespace

void sample_within(const float* logits, const double* parameters, const int64_t* seeds, const int64_t* positions,
                 int64_t rows, int64_t size, int64_t stride, int32_t* tokens, float* highest) {
    int64_t* likeliest = (int64_t*)scratch(4, sizeof(int64_t) * rows);
    first_max(logits, rows, size, stride, likeliest, highest);
    parallel(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const Limits limits = limits_of(parameters, rows, r);
            tokens[r] = (int32_t)likeliest[r];
            if (highest[r] != highest[r]) highest[r] = INFINITY;
            if (is_greedy(limits, highest[r])) continue;
            const Row row{logits + r * stride, size, 0};
            tokens[r] = draw_row(row, highest[r], limits, (uint64_t)seeds[r], (uint64_t)positions[r]);
        }
    });
}

void offer_candidates(const float* logits, const double* parameters, const int64_t* seeds, const int64_t* positions,
                      int64_t first_token, int64_t count, int64_t rows, int64_t size, int64_t stride, float* out) {
    int64_t* likeliest = (int64_t*)scratch(4, sizeof(int64_t) * rows);
    float* highest = (float*)scratch(5, sizeof(float) * rows);
    first_max(logits, rows, size, stride, likeliest, highest);
    parallel(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const Row row{logits + r * stride, size, first_token};
            float* offer = out + r * (1 + 2 * count);
            const auto put_token = [&](int64_t i, int32_t id, float logit) {
                offer[1 + i] = logit;
                offer[1 + count + i] = float_of((uint32_t)id);
            };
            const auto put_one = [&](int32_t id) { put_token(0, id, row.logits[id - first_token]); };
            offer[0] = highest[r] != highest[r] ? INFINITY : highest[r];
            for (int64_t i = 1; i < count; ++i) put_token(i, (int32_t)first_token, -INFINITY);
            put_one((int32_t)(first_token + likeliest[r]));
            if (!parameters) continue;
            Limits limits = limits_of(parameters, rows, r);
            if (is_greedy(limits, offer[0])) continue;
            if (limits.top_k == 0) {
                limits = {limits.temperature, -INFINITY, 0, 1.0};
                put_one(draw_row(row, offer[0], limits, (uint64_t)seeds[r], (uint64_t)positions[r]));
                continue;
            }
            Tokens tokens = room_for(size);
            if (limits.top_k > count) limits.top_k = count;
            collect_first(row, limits, offer[0] / limits.temperature, LOWEST, tokens);
            for (int64_t i = 0; i < tokens.count; ++i)
                put_token(i, tokens.ids[i], row.logits[tokens.ids[i] - first_token]);
        }
    });
}

void sample_among(const float* offers, const double* parameters, const int64_t* seeds, const int64_t* positions,
                int64_t ranks, int64_t count, int64_t rows, int32_t* tokens, float* highest) {
    const int64_t width = 1 + 2 * count;
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = offers + r * ranks * width;
        const auto logit = [&](int64_t i) { return row[i / count * width + 1 + i % count]; };
        const auto id = [&](int64_t i) { return int_of(row[i / count * width + 1 + count + i % count]); };
        int64_t best = 0;
        float most = row[0];
        for (int64_t i = 1; i < ranks; ++i) most = row[i * width] > most ? row[i * width] : most;
        for (int64_t i = 1; i < ranks * count; ++i) best = logit(i) > logit(best) ? i : best;
        highest[r] = most;
        tokens[r] = id(best);
        if (!parameters) continue;
        const Limits limits = limits_of(parameters, rows, r);
        if (is_greedy(limits, most)) continue;
        const float top = most / limits.temperature, by_min_p = top + limits.log_min_p;
        const float lowest = by_min_p > LOWEST ? by_min_p : LOWEST;
        Tokens found = room_for(ranks * count);
        for (int64_t i = 0; i < ranks * count; ++i) {
            found.scaled[found.count] = logit(i) / limits.temperature;
            found.ids[found.count] = id(i);
            found.count += found.scaled[found.count] >= lowest;
        }
        if (limits.top_k > 0) keep_first(found, limits.top_k);
        if (limits.has_p()) keep_top_p(found, top, limits.top_p);
        tokens[r] = best_of(found, (uint64_t)seeds[r], (uint64_t)positions[r]);
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
