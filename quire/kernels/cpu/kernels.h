// What every source with kernels includes: the vector type, the thread pool and the declarations of kernels.def.
//
// Such a source is compiled once per instruction set, each time into its own namespace QUIRE_NS. Whatever it uses from
// outside must be a plain function of pool.cpp, or be inlined for certain: a template or an inline function of the
// standard library would be emitted once per instruction set under one name, and the linker would keep any of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "simd.h"

namespace quire {
namespace QUIRE_NS {
#define KERNEL(name, ...) void name(__VA_ARGS__);
#include "kernels.def"
#undef KERNEL

// f(index, count) over [0, width) in vectors, the rest through a part of one, so that each element is treated alike.
template <class F>
static inline void map(int64_t width, F f) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) f(i, LANES);
    if (i < width) f(i, (int)(width - i));
}

// A line that will be read soon, into the second-level cache: the first level has so few misses under way at a time that
// fetching into it halves the rate at which one core reads memory (benchmarks/notes/cpu.md).
static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

static inline Vec get(const float* p, int n) { return n == LANES ? load(p) : load_part(p, n); }
static inline void put(float* p, Vec v, int n) { n == LANES ? store(p, v) : store_part(p, v, n); }

// Rows that each of `size` ranks holds of `rows`: all that are held by rows have the same share, else it is 0 and found here.
static inline int64_t share_of(int64_t rows, int64_t share, int64_t size) { return share ? share : (rows + size - 1) / size; }
}  // namespace QUIRE_NS
}  // namespace quire
