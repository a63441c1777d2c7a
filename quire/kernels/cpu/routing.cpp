// Routing: which experts a token goes to, and with which weights. See ops/routing.py.
#include "gate.h"

namespace quire {
namespace QUIRE_NS {
namespace {

enum Score { SOFTMAX, SIGMOID, SQRT_SOFTPLUS, LOGITS };
enum Weighting { SCORES, CHOSEN_SOFTMAX, CHOSEN_SIGMOID, SPARSE_MIXER };
constexpr float NEVER = -INFINITY;

float total(const float* x, int64_t count) {
    float sum = x[0];
    for (int64_t i = 1; i < count; ++i) sum += x[i];
    return sum;
}

float highest(const float* x, int64_t count) {
    float most = x[0];
    for (int64_t i = 1; i < count; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

void exponentials(const float* x, float shift, float sign, int64_t count, float* out) {
    map(count, [&](int64_t i, int n) { put(out + i, exp(mul(sub(get(x + i, n), set(shift)), set(sign))), n); });
}

void softmax(const float* x, int64_t count, float* out) {
    exponentials(x, highest(x, count), 1.0f, count, out);
    const float sum = total(out, count);
    for (int64_t i = 0; i < count; ++i) out[i] /= sum;
}

void sigmoid(const float* x, int64_t count, float* out) {
    exponentials(x, 0.0f, -1.0f, count, out);
    for (int64_t i = 0; i < count; ++i) out[i] = 1.0f / (1.0f + out[i]);
}

void score_row(const float* logits, int64_t experts, int score, float* out) {
    if (score == SOFTMAX) return softmax(logits, experts, out);
    if (score == SIGMOID) return sigmoid(logits, experts, out);
    if (score == LOGITS) {
        std::memcpy(out, logits, experts * sizeof(float));
        return;
    }
    for (int64_t e = 0; e < experts; ++e) out[e] = -std::fabs(logits[e]);
    exponentials(out, 0.0f, 1.0f, experts, out);
    for (int64_t e = 0; e < experts; ++e)
        out[e] = std::sqrt((logits[e] > 0.0f ? logits[e] : 0.0f) + std::log(1.0f + out[e]));
}

// The indices of the `most` highest values, the first of equal ones first; `values` are used up.
void take_best(float* values, int64_t count, int64_t most, int32_t* out) {
    uint8_t* taken = (uint8_t*)scratch(5, count);
    std::memset(taken, 0, count);
    for (int64_t slot = 0; slot < most; ++slot) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; ++i)
            if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
        taken[best] = 1;
        out[slot] = (int32_t)best;
    }
}

// -infinity for all experts but those of the best groups.
void keep_groups(float* choice, int64_t experts, int64_t groups, int64_t top_groups, int top2) {
    const int64_t size = experts / groups;
    float* of_group = (float*)scratch(6, groups * (2 * sizeof(float) + sizeof(int32_t)));
    float* kept = of_group + groups;
    int32_t* best = (int32_t*)(kept + groups);
    for (int64_t g = 0; g < groups; ++g) {
        float first = NEVER, second = NEVER;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            const float value = choice[i];
            if (value > first)
                second = first, first = value;
            else if (value > second)
                second = value;
        }
        of_group[g] = top2 ? first + second : first;
        kept[g] = 0.0f;
    }
    take_best(of_group, groups, top_groups, best);
    for (int64_t i = 0; i < top_groups; ++i) kept[best[i]] = 1.0f;
    for (int64_t e = 0; e < experts; ++e)
        if (kept[e / size] == 0.0f) choice[e] = NEVER;
}

// A softmax for each slot over the experts that are open, which those far below the slot's own are not.
void mix_sparsely(const float* logits, int64_t experts, const int32_t* ids, int64_t k, float margin, float* part,
                  float* weights) {
    uint8_t* closed = (uint8_t*)scratch(5, experts);
    std::memset(closed, 0, experts);
    for (int64_t slot = 0; slot < k; ++slot) {
        const float best = logits[ids[slot]];
        for (int64_t e = 0; e < experts; ++e) {
            const float size = std::fabs(logits[e]), bound = size > best ? size : best;
            part[e] = closed[e] || (best - logits[e]) / bound > margin ? NEVER : logits[e];
        }
        softmax(part, experts, part);
        weights[slot] = part[ids[slot]];
        closed[ids[slot]] = 1;
    }
}

}  // namespace

void route(const float* logits, const float* bias, int32_t* ids, float* weights, int64_t rows, int64_t experts, int64_t k,
           int score, int weighting, int renormalize, float scale, int64_t groups, int64_t top_groups, int top2,
           float least_sum, float margin) {
    parallel(rows, 1 + 2048 / experts, [&](int64_t begin, int64_t end) {
        float* scores = (float*)scratch(4, 2 * experts * sizeof(float));
        float* choice = scores + experts;
        for (int64_t r = begin; r < end; ++r) {
            const float* row = logits + r * experts;
            int32_t* chosen = ids + r * k;
            float* out = weights + r * k;
            score_row(row, experts, score, scores);
            for (int64_t e = 0; e < experts; ++e) choice[e] = bias ? scores[e] + bias[e] : scores[e];
            if (top_groups < groups) keep_groups(choice, experts, groups, top_groups, top2);
            take_best(choice, experts, k, chosen);
            for (int64_t j = 0; j < k; ++j) out[j] = weighting == SCORES ? scores[chosen[j]] : row[chosen[j]];
            if (weighting == CHOSEN_SOFTMAX) softmax(out, k, out);
            if (weighting == CHOSEN_SIGMOID) sigmoid(out, k, out);
            if (weighting == SPARSE_MIXER) mix_sparsely(row, experts, chosen, k, margin, choice, out);
            const float sum = total(out, k), divisor = !renormalize ? 1.0f : sum > least_sum ? sum : least_sum;
            for (int64_t j = 0; j < k; ++j) out[j] = (renormalize ? out[j] / divisor : out[j]) * scale;
        }
    });
}

void add_shared(const float* routed, const float* shared, const float* gate, float* out, int64_t rows, int64_t width) {
    parallel(rows, 1 + 8192 / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float part = 0.0f;
            if (gate) sigmoid(gate + r, 1, &part);
            map(width, [&](int64_t i, int n) {
                const Vec value = get(shared + r * width + i, n);
                put(out + r * width + i, add(get(routed + r * width + i, n), gate ? mul(value, set(part)) : value), n);
            });
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
