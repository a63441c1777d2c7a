// The two ends of a step: its inputs gathered from the permanent rows, and its tokens appended to them.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

void gather_mixed(const int64_t* rows, const int32_t* contexts, const int32_t* starts, const int32_t* token_ids,
                  int64_t* num_computed, int64_t token_stride, int64_t num_rows, int64_t size, int64_t* ids,
                  int64_t* positions) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t count = starts[r + 1] - starts[r], first = contexts[r] - count;
        if (count == 0) continue;
        const int32_t* known = token_ids + rows[r] * token_stride + first;
        for (int64_t i = 0; i < count; ++i) {
            ids[starts[r] + i] = known[i];
            positions[starts[r] + i] = first + i;
        }
        num_computed[rows[r]] = contexts[r];
    }
    for (int64_t i = starts[num_rows]; i < size; ++i) ids[i] = positions[i] = 0;
}

void gather_slots(const int64_t* rows, const int32_t* starts, const int64_t* positions, const int32_t* tables,
                  int64_t table_stride, int64_t block_size, int64_t num_rows, int64_t size, int64_t* slots) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const int32_t* table = tables + rows[r] * table_stride;
        for (int64_t i = starts[r]; i < starts[r + 1]; ++i)
            slots[i] = table[positions[i] / block_size] * block_size + positions[i] % block_size;
    }
    for (int64_t i = starts[num_rows]; i < size; ++i) slots[i] = 0;
}

void gather_decode(const int64_t* rows, const int32_t* token_ids, const int64_t* num_computed, int64_t token_stride,
                   int64_t count, int64_t* ids, int64_t* positions, int32_t* contexts) {
    for (int64_t i = 0; i < count; ++i) {
        positions[i] = num_computed[rows[i]];
        contexts[i] = (int32_t)positions[i] + 1;
        ids[i] = token_ids[rows[i] * token_stride + positions[i]];
    }
}

void decode_slots(const int64_t* rows, const int64_t* positions, const int32_t* tables, int64_t table_stride,
                  int64_t block_size, int64_t count, int64_t* slots) {
    for (int64_t i = 0; i < count; ++i)
        slots[i] = tables[rows[i] * table_stride + positions[i] / block_size] * block_size + positions[i] % block_size;
}

void gather_sampling(const int64_t* rows, const double* table, int64_t table_stride, const int64_t* seeds,
                     const int64_t* num_tokens, const int64_t* num_prompt_tokens, const int32_t* ahead, int64_t count,
                     double* parameters, int64_t* row_seeds, int64_t* positions) {
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t p = 0; p < 4; ++p) parameters[p * count + i] = table[p * table_stride + rows[i]];
        row_seeds[i] = seeds[rows[i]];
        positions[i] = num_tokens[rows[i]] - num_prompt_tokens[rows[i]] + (ahead ? ahead[i] : 0);
    }
}

void place_drafts(const int64_t* rows, const int32_t* starts, int32_t* contexts, const int64_t* sample_rows,
                  const int32_t* ahead, const int32_t* drafts, int32_t* sample_contexts, int32_t* token_ids,
                  const int64_t* num_tokens, const int64_t* num_computed, int64_t token_stride, int64_t num_rows,
                  int64_t num_samples) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t count = starts[r + 1] - starts[r], exact = num_computed[rows[r]] + count;
        if (count && exact < contexts[r]) contexts[r] = (int32_t)exact;
    }
    for (int64_t i = 0; i < num_samples; ++i) {
        const int64_t known = num_tokens[sample_rows[i]], exact = known + ahead[i];
        if (known && exact < sample_contexts[i]) sample_contexts[i] = (int32_t)exact;
        if (ahead[i] > 0) token_ids[sample_rows[i] * token_stride + sample_contexts[i] - 1] = drafts[i];
    }
}

namespace {
enum Status { OK, BAD_LOGITS, NO_TOKEN, OVERFLOWS };  // as in types/status.py

Status status_of(float highest, const float* raw, int64_t parts) {
    if (!raw) return __builtin_isinf(highest) ? BAD_LOGITS : OK;
    float most = raw[0];
    for (int64_t p = 1; p < parts; ++p) most = raw[p] > most ? raw[p] : most;
    if (__builtin_isinf(most)) return BAD_LOGITS;
    if (!__builtin_isinf(highest)) return OK;
    return highest < 0 ? NO_TOKEN : OVERFLOWS;
}
}  // namespace

void append_tokens(const int64_t* rows, const int32_t* ids, const float* highest, const float* raw, int64_t parts,
                   int32_t* token_ids, int64_t* num_tokens, int64_t* num_computed, int64_t token_stride,
                   int64_t scratch_row, const int32_t* ahead, int64_t count, int32_t* out) {
    bool holds = true;  // whether all drafts ahead are what was sampled
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = rows[i];
        out[2 * i] = ids[i];
        out[2 * i + 1] = status_of(highest[i], raw ? raw + i * parts : raw, parts);
        if (row == scratch_row) continue;
        if (ahead && ahead[i] == 0) holds = true;
        if (!holds) continue;
        if (ahead && i + 1 < count && ahead[i + 1]) holds = token_ids[row * token_stride + num_tokens[row]] == ids[i];
        num_computed[row] = num_tokens[row];
        token_ids[row * token_stride + num_tokens[row]++] = ids[i];
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
