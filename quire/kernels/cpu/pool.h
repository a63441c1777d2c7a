// The thread pool's interface: an index range shared piece by piece, and scratch memory that is kept between calls.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

using Body = void (*)(const void* context, int64_t begin, int64_t end);

// Call body on pieces of [0, count), each at least `grain` long, on all threads. Returns when all are done.
void run_pieces(int64_t count, int64_t grain, Body body, const void* context);

void set_threads(int count);
int num_threads();

// Whether this processor converts to float32 in other pipes than it multiplies in: AMD's do, Intel's share two ports.
bool converts_beside_fma();

// This thread's memory `slot` (of SCRATCH_SLOTS), at least `bytes` long, aligned to 64 bytes; its content is anything.
constexpr int SCRATCH_SLOTS = 9;
void* scratch(int slot, size_t bytes);

#ifdef QUIRE_NS
namespace QUIRE_NS {
// f(begin, end) on pieces of [0, count).
template <class F>
static inline void parallel(int64_t count, int64_t grain, const F& f) {
    run_pieces(
        count, grain,
        [](const void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); }, &f);
}
}  // namespace QUIRE_NS
#endif

}  // namespace quire
