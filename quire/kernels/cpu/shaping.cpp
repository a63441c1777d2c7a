// What changes logits before a token is chosen, by tables indexed by row: masks, edits and penalties.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int64_t CHUNK = 4096;     // tokens of a row that one thread takes at a time, as in ops/shaping.py
constexpr int64_t FIXED_COLUMNS = 4;  // of an edit, as in ops/shaping.py
constexpr int32_t ANY = -1;

// The highest of `count` values; infinite where one is NaN.
float highest_of(const float* x, int64_t count) {
    float most = -INFINITY;
    bool broken = false;
    for (int64_t i = 0; i < count; ++i) {
        most = x[i] > most ? x[i] : most;
        broken |= x[i] != x[i];
    }
    return broken ? INFINITY : most;
}

float from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace

void keep_allowed(const float* logits, const int64_t* rows, const int32_t* masks, const int32_t* lines,
                  const int32_t* ahead, float* out, float* highest, int64_t count, int64_t size, int64_t stride, int64_t words, int64_t num_lines,
                  int64_t lines_stride) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
    parallel(count * chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t piece = begin; piece < end; ++piece) {
            const int64_t line = piece / chunks, first = piece % chunks * CHUNK;
            const int64_t n = size - first < CHUNK ? size - first : CHUNK;
            const float* x = logits + line * stride + first;
            float* y = out + line * size + first;
            highest[piece] = highest_of(x, n);
            memcpy(y, x, n * sizeof(float));
            for (int64_t k = 0; k < num_lines; ++k) {
                int64_t which = lines[k * lines_stride + rows[line]];
                if (which < 0) continue;
                if (ahead && k == 0) which += ahead[line];
                const int32_t* mask = masks + which * words + first / 32;
                for (int64_t i = 0; i < n; ++i)
                    if (!((uint32_t)mask[i / 32] >> (i % 32) & 1)) y[i] = -INFINITY;
            }
        }
    });
}

void edit_logits(float* logits, const int64_t* rows, const int32_t* edits, const int32_t* starts,
                 const int32_t* counts, const int32_t* token_ids, const int64_t* num_tokens,
                 const int64_t* num_prompt_tokens, const int32_t* ahead, int64_t count, int64_t stride,
                 int64_t columns, int64_t token_stride) {
    for (int64_t line = 0; line < count; ++line) {
        const int64_t row = rows[line], known = num_tokens[row] + (ahead ? ahead[line] : 0);
        const int64_t outputs = known - num_prompt_tokens[row];
        float* x = logits + line * stride;
        // First what is added, then what is banned, so that a ban wins.
        for (int banning = 0; banning < 2; ++banning) {
            for (int64_t e = 0; e < counts[row]; ++e) {
                const int32_t* edit = edits + (starts[row] + e) * columns;
                const float value = from_bits(edit[1]);
                bool active = (value == -INFINITY) == (banning == 1) && outputs < edit[2] && edit[3] <= outputs;
                for (int64_t k = FIXED_COLUMNS; active && k < columns; ++k) {
                    const int64_t place = known - 1 - (k - FIXED_COLUMNS);
                    active = edit[k] == ANY || edit[k] == token_ids[row * token_stride + (place > 0 ? place : 0)];
                }
                if (active) x[edit[0]] = banning ? value : x[edit[0]] + value;
            }
        }
    }
}

void penalize(float* logits, const int64_t* rows, const float* penalties, int64_t penalties_stride,
              const int32_t* token_ids, const int64_t* num_tokens, const int64_t* num_prompt_tokens, const int32_t* ahead,
              int64_t count, int64_t size, int64_t stride, int64_t token_stride) {
    constexpr int32_t IN_PROMPT = 1 << 30;  // above any count of outputs
    parallel(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; ++line) {
            const int64_t row = rows[line], known = num_tokens[row] + (ahead ? ahead[line] : 0);
            const float presence = penalties[row], frequency = penalties[penalties_stride + row];
            const float repetition = penalties[2 * penalties_stride + row];
            if (presence == 0.0f && frequency == 0.0f && repetition == 1.0f) continue;
            int32_t* seen = (int32_t*)scratch(0, size * sizeof(int32_t));
            const int32_t* tokens = token_ids + row * token_stride;
            for (int64_t i = 0; i < known; ++i)
                if (tokens[i] >= 0 && tokens[i] < size) seen[tokens[i]] = 0;
            for (int64_t i = 0; i < known; ++i) {
                if (tokens[i] < 0 || tokens[i] >= size) continue;
                if (i < num_prompt_tokens[row])
                    seen[tokens[i]] |= IN_PROMPT;
                else
                    ++seen[tokens[i]];
            }
            float* x = logits + line * stride;
            for (int64_t i = 0; i < known; ++i) {
                const int32_t token = tokens[i];
                if (token < 0 || token >= size || seen[token] == 0) continue;  // not a token, or penalized already
                const int32_t outputs = seen[token] & (IN_PROMPT - 1);
                seen[token] = 0;
                float value = x[token];
                value = value > 0.0f ? value / repetition : value * repetition;
                value -= (float)outputs * frequency;
                x[token] = value - (outputs > 0 ? presence : 0.0f);
            }
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
