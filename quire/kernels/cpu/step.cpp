// The two ends of a decode step: its inputs gathered from the permanent rows, and its tokens appended to them.
#include "kernels.h"

namespace quire {
namespace QUIRE_NS {

void gather_tokens(const int64_t* rows, const int32_t* token_ids, const int64_t* num_computed, int64_t token_stride,
                   int64_t count, int64_t* ids, int64_t* positions, int32_t* contexts) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t position = num_computed[rows[i]];
        ids[i] = token_ids[rows[i] * token_stride + position];
        positions[i] = position;
        contexts[i] = (int32_t)(position + 1);
    }
}

void gather_slots(const int64_t* rows, const int64_t* positions, const int32_t* tables, int64_t table_stride,
                  int64_t block_size, int64_t count, int64_t* slots) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t block = tables[rows[i] * table_stride + positions[i] / block_size];
        slots[i] = block * block_size + positions[i] % block_size;
    }
}

void gather_draws(const int64_t* rows, const double* table, int64_t table_stride, const int64_t* seeds,
                  const int64_t* num_tokens, const int64_t* num_prompt_tokens, int64_t count, double* parameters,
                  int64_t* row_seeds, int64_t* positions) {
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t p = 0; p < 4; ++p) parameters[p * count + i] = table[p * table_stride + rows[i]];
        row_seeds[i] = seeds[rows[i]];
        positions[i] = num_tokens[rows[i]] - num_prompt_tokens[rows[i]];
    }
}

void append_tokens(const int64_t* rows, const int32_t* ids, const float* best, int32_t* token_ids,
                   int64_t* num_tokens, int64_t* num_computed, int64_t token_stride, int64_t scratch_row,
                   int64_t count, int32_t* out) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = rows[i];
        out[2 * i] = ids[i];
        out[2 * i + 1] = !__builtin_isfinite(best[i]);
        if (row == scratch_row) continue;
        token_ids[row * token_stride + num_tokens[row]++] = ids[i];
        ++num_computed[row];
    }
}

}  // namespace QUIRE_NS
}  // namespace quire
