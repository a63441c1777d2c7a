// The library's C interface: which instruction sets this build and this processor share, and each one's kernels.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "pool.h"

#define KERNEL(name, ...) void name(__VA_ARGS__);
namespace quire {
namespace portable {
#include "kernels.def"
}
#ifdef QUIRE_X86
namespace avx2 {
#include "kernels.def"
}
namespace avx512 {
#include "kernels.def"
}
// Matmuls of integers: without VNNI there is nothing to gain from vectors wider than AVX2's, with it they differ.
#define INTEGER_KERNELS(prefix)                                                                                            \
    namespace avx512 {                                                                                                     \
    void prefix##_matmul(const void* plan, const float* x, float* out, int64_t rows) {                                     \
        avx2::prefix##_matmul(plan, x, out, rows);                                                                         \
    }                                                                                                                      \
    void prefix##_grouped_gate_up(const void* plans, const float* x, const int32_t* ids, float* out, int64_t tokens,       \
                                  int64_t k, int64_t experts, int activation) {                                            \
        avx2::prefix##_grouped_gate_up(plans, x, ids, out, tokens, k, experts, activation);                                \
    }                                                                                                                      \
    void prefix##_grouped_down(const void* plans, const float* a, const int32_t* ids, const float* weights, float* out,    \
                               int64_t tokens, int64_t k, int64_t experts) {                                               \
        avx2::prefix##_grouped_down(plans, a, ids, weights, out, tokens, k, experts);                                      \
    }                                                                                                                      \
    }                                                                                                                      \
    namespace avx512vnni {                                                                                                 \
    void prefix##_matmul(const void* plan, const float* x, float* out, int64_t rows);                                      \
    void prefix##_grouped_gate_up(const void* plans, const float* x, const int32_t* ids, float* out, int64_t tokens,       \
                                  int64_t k, int64_t experts, int activation);                                             \
    void prefix##_grouped_down(const void* plans, const float* a, const int32_t* ids, const float* weights, float* out,    \
                               int64_t tokens, int64_t k, int64_t experts);                                                \
    }
namespace avx512vnni {
using namespace avx512;
}
INTEGER_KERNELS(integer)
INTEGER_KERNELS(byte)
#endif
}  // namespace quire
#undef KERNEL

namespace {

// A recorded call: each argument in 8 bytes, of which a float has the first four.
template <class T>
T argument(int64_t slot) {
    if constexpr (std::is_same_v<T, float>) {
        float value;
        std::memcpy(&value, &slot, sizeof value);
        return value;
    } else if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(slot);
    } else {
        return static_cast<T>(slot);
    }
}

template <class... Types, size_t... Index>
void call(void (*function)(Types...), const int64_t* slots, std::index_sequence<Index...>) {
    function(argument<Types>(slots[Index])...);
}

template <class... Types>
void spread(void (*function)(Types...), const int64_t* slots) {
    call(function, slots, std::index_sequence_for<Types...>{});
}

template <auto FUNCTION>
void invoke(const int64_t* slots) {
    spread(FUNCTION, slots);
}

struct Kernel {
    const char* name;
    void* function;
    void (*invoke)(const int64_t* slots);
};

struct InstructionSet {
    const char* name;
    const Kernel* kernels;
    bool (*runs_here)();
};

#define KERNEL(name, ...) {#name, (void*)&QUIRE_SET::name, &invoke<&QUIRE_SET::name>},
#define QUIRE_SET quire::portable
const Kernel portable_kernels[] = {
#include "kernels.def"
    {nullptr, nullptr, nullptr}};
#undef QUIRE_SET
#ifdef QUIRE_X86
#define QUIRE_SET quire::avx2
const Kernel avx2_kernels[] = {
#include "kernels.def"
    {nullptr, nullptr, nullptr}};
#undef QUIRE_SET
#define QUIRE_SET quire::avx512
const Kernel avx512_kernels[] = {
#include "kernels.def"
    {nullptr, nullptr, nullptr}};
#undef QUIRE_SET
#define QUIRE_SET quire::avx512vnni
const Kernel avx512vnni_kernels[] = {
#include "kernels.def"
    {nullptr, nullptr, nullptr}};
#undef QUIRE_SET

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

// The best first.
const InstructionSet sets[] = {
#ifdef QUIRE_X86
    {"avx512vnni", avx512vnni_kernels, has_avx512vnni},
    {"avx512", avx512_kernels, has_avx512},
    {"avx2", avx2_kernels, has_avx2},
#endif
    {"portable", portable_kernels, [] { return true; }},
};
constexpr int NUM_SETS = sizeof(sets) / sizeof(sets[0]);

const Kernel* find(const char* instruction_set, const char* name) {
    for (int i = 0; i < NUM_SETS; ++i) {
        if (std::strcmp(sets[i].name, instruction_set) != 0 || !sets[i].runs_here()) continue;
        for (const Kernel* kernel = sets[i].kernels; kernel->name; ++kernel)
            if (std::strcmp(kernel->name, name) == 0) return kernel;
    }
    return nullptr;
}

}  // namespace

#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))

// The names of the instruction sets that run here, the best first; null past the last.
QUIRE_EXPORT const char* quire_instruction_set(int index) {
    for (int i = 0; i < NUM_SETS; ++i)
        if (sets[i].runs_here() && index-- == 0) return sets[i].name;
    return nullptr;
}

// The address of a kernel; null if there is none of that name.
QUIRE_EXPORT void* quire_kernel(const char* instruction_set, const char* name) {
    const Kernel* kernel = find(instruction_set, name);
    return kernel ? kernel->function : nullptr;
}

// The address of what calls a kernel with recorded arguments, for quire_replay.
QUIRE_EXPORT void* quire_invoker(const char* instruction_set, const char* name) {
    const Kernel* kernel = find(instruction_set, name);
    return kernel ? (void*)kernel->invoke : nullptr;
}

// Recorded calls in their order, each an invoker, the number of its arguments, and these.
QUIRE_EXPORT void quire_replay(const int64_t* program, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; ++i) {
        const auto invoker = reinterpret_cast<void (*)(const int64_t*)>(program[0]);
        invoker(program + 2);
        program += 2 + program[1];
    }
}

QUIRE_EXPORT void quire_set_threads(int count) { quire::set_threads(count); }
QUIRE_EXPORT int quire_num_threads() { return quire::num_threads(); }
