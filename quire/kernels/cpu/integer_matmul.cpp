// Matmuls of rows rounded to 16-bit integers.
#include "words16.h"
#include "integer_matmul.h"

namespace quire {
namespace QUIRE_NS {

void integer_grouped_gate_up(const void* plans, const float* x, const int32_t* ids, float* out, int64_t tokens, int64_t k,
                             int64_t experts, int activation) {
    run_gate_up(plans, x, ids, out, tokens, k, experts, activation, QUIRE_WORDS::grouped_rows);
}

void integer_grouped_down(const void* plans, const float* a, const int32_t* ids, const float* weights, float* out,
                          int64_t tokens, int64_t k, int64_t experts) {
    run_down(plans, a, ids, weights, out, tokens, k, experts, QUIRE_WORDS::grouped_rows);
}

void integer_matmul(const void* plan, const float* x, float* out, int64_t rows) {
    const Plan& of = *(const Plan*)plan;
    QUIRE_WORDS::multiply_all(of, in_order(of, x, rows), out, rows);
}

}  // namespace QUIRE_NS
}  // namespace quire
