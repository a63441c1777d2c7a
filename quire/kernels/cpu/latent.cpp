// Latent attention around its attention proper: what is kept of a token, and the matrices of single heads.
#include "latent_cache.h"
#include "norm.h"
#include "rotate.h"

#include <type_traits>

namespace quire {
namespace QUIRE_NS {
namespace {

enum UpType { UP_FLOAT32 = 0, UP_FLOAT16 = 1, UP_BFLOAT16 = 2, UP_CODES = 3 };  // as latent.py numbers them

constexpr int64_t CHUNK = 16;     // tokens of a piece of work: a block's, since two threads should not write to one
constexpr int TOKENS = 6;         // whose sums are in registers together
constexpr int VECTORS = 4;        // of outputs beside them
constexpr int64_t FEW_TOKENS = 2;  // so few read the matrix from the first line to the last, and keep sums in memory
constexpr int64_t GROUP = 32;      // codes of an output that share a scale
constexpr int64_t AHEAD = 8192;    // bytes of codes that are fetched ahead, at least

// The matrix [inner, outputs] of one head as floats of some type.
template <class Format>
struct Floats {
    using Element = typename Format::Element;
    const Element* first;
    int64_t outputs;

    static int64_t bytes(int64_t inner, int64_t outputs) { return inner * outputs * (int64_t)sizeof(Element); }
    Floats(const char* memory, int64_t, int64_t outputs) : first((const Element*)memory), outputs(outputs) {}
    Vec read(int64_t k, int64_t column, int n) const {
        const Element* p = first + k * outputs + column;
        if (n == LANES) return Format::read(p);
        Element lanes[LANES] = {};
        std::memcpy(lanes, p, sizeof(lanes[0]) * n);
        return Format::read(lanes);
    }
};

// The same as codes [inner, outputs] of 8 bits, and behind them scales [inner / GROUP, outputs] of 16.
struct CodesAndScales {
    const int8_t* codes;
    const uint16_t* scales;
    int64_t outputs;

    static int64_t bytes(int64_t inner, int64_t outputs) { return (inner + 2 * (inner / GROUP)) * outputs; }
    CodesAndScales(const char* memory, int64_t inner, int64_t outputs)
        : codes((const int8_t*)memory), scales((const uint16_t*)(memory + inner * outputs)), outputs(outputs) {}
    Vec code(int64_t k, int64_t column, int n) const {
        const int8_t* p = codes + k * outputs + column;
        if (n == LANES) return load_int8(p);
        int8_t lanes[LANES] = {};
        std::memcpy(lanes, p, n);
        return load_int8(lanes);
    }
    Vec scale(int64_t k, int64_t column, int n) const {
        const uint16_t* p = scales + k / GROUP * outputs + column;
        if (n == LANES) return load_half(p);
        uint16_t lanes[LANES] = {};
        std::memcpy(lanes, p, sizeof(lanes[0]) * n);
        return load_half(lanes);
    }
    Vec read(int64_t k, int64_t column, int n) const { return mul(code(k, column, n), scale(k, column, n)); }
};

// Each output is summed over k from the first to the last, whatever the number of tokens.
template <class Format>
void multiply_few(const float* x, const Floats<Format>& w, float* out, int64_t inner, int64_t outputs) {
    map(outputs, [&](int64_t i, int n) { put(out + i, zero(), n); });
    for (int64_t k = 0; k < inner; ++k) {
        const Vec factor = set(x[k]);
        map(outputs, [&](int64_t i, int n) { put(out + i, fma(factor, w.read(k, i, n), get(out + i, n)), n); });
    }
}

void multiply_few(const float* x, const CodesAndScales& w, float* out, int64_t inner, int64_t outputs) {
    constexpr int64_t WIDTH = VECTORS * LANES;
    const int64_t ahead = GROUP * outputs > AHEAD ? GROUP * outputs : AHEAD;
    for (int64_t group = 0; group < inner; group += GROUP) {
        const int8_t* next = w.codes + group * outputs + ahead;
        int64_t i = 0;
        for (; i + WIDTH <= outputs; i += WIDTH) {
            Vec acc[VECTORS], scale[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                acc[v] = group ? load(out + i + v * LANES) : zero();
                scale[v] = load_half(w.scales + group / GROUP * outputs + i + v * LANES);
            }
            for (int64_t k = group; k < group + GROUP; ++k, next += WIDTH) {
                fetch(next);
                const Vec factor = set(x[k]);
                for (int v = 0; v < VECTORS; ++v)
                    acc[v] = fma(factor, mul(load_int8(w.codes + k * outputs + i + v * LANES), scale[v]), acc[v]);
            }
            for (int v = 0; v < VECTORS; ++v) store(out + i + v * LANES, acc[v]);
        }
        for (; i < outputs; i += LANES) {
            const int n = outputs - i < LANES ? (int)(outputs - i) : LANES;
            Vec acc = group ? get(out + i, n) : zero();
            for (int64_t k = group; k < group + GROUP; ++k) acc = fma(set(x[k]), w.read(k, i, n), acc);
            put(out + i, acc, n);
        }
    }
}

template <class Matrix, int ROWS>
void multiply_tile(const float* x, int64_t x_token, const Matrix& w, float* out, int64_t out_token, int64_t inner,
                   int64_t outputs, int64_t first) {
    Vec acc[ROWS][VECTORS];
    int width[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t rest = outputs - first - v * LANES;
        width[v] = rest < 0 ? 0 : rest < LANES ? (int)rest : LANES;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    for (int64_t k = 0; k < inner; ++k) {
        Vec weight[VECTORS];
        for (int v = 0; v < VECTORS; ++v) weight[v] = width[v] ? w.read(k, first + v * LANES, width[v]) : zero();
        for (int r = 0; r < ROWS; ++r) {
            const Vec factor = set(x[r * x_token + k]);
            for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(factor, weight[v], acc[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            if (width[v]) put(out + r * out_token + first + v * LANES, acc[r][v], width[v]);
}

template <class Matrix>
void multiply_head(const float* x, int64_t x_token, const Matrix& w, float* out, int64_t out_token, int64_t tokens,
                   int64_t inner, int64_t outputs) {
    if (tokens <= FEW_TOKENS) {
        for (int64_t t = 0; t < tokens; ++t) multiply_few(x + t * x_token, w, out + t * out_token, inner, outputs);
        return;
    }
    for (int64_t first = 0; first < outputs; first += VECTORS * LANES) {
        int64_t t = 0;
        for (; t + TOKENS <= tokens; t += TOKENS)
            multiply_tile<Matrix, TOKENS>(x + t * x_token, x_token, w, out + t * out_token, out_token, inner, outputs,
                                          first);
        for (; t < tokens; ++t)
            multiply_tile<Matrix, 1>(x + t * x_token, x_token, w, out + t * out_token, out_token, inner, outputs, first);
    }
}

}  // namespace

void prepare_latent(const float* q, int64_t q_token, const float* latent, int64_t latent_token, const float* norm,
                    const float* cos, const float* sin, const int64_t* slots, float* query, void* cache, int64_t tokens,
                    int64_t num_written, int64_t heads, int64_t nope, int64_t rope, int64_t rank, int64_t block_size,
                    int64_t line_bytes, int kv_type, float eps) {
    const int64_t width = rank + rope;
    with_format(kv_type, [&](auto format) {
        using Format = decltype(format);
        const LatentCells<Format> cells{(char*)cache, width, block_size, line_bytes};
        parallel((tokens + CHUNK - 1) / CHUNK, 1 + 8192 / (CHUNK * (heads * rope + width)), [&](int64_t begin, int64_t end) {
            float* line = (float*)scratch(0, sizeof(float) * width);
            const int64_t last = end * CHUNK < tokens ? end * CHUNK : tokens;
            const auto turn = [&](const float* x, int64_t t, float* out) {
                if (cos)
                    rotate(x, cos + t * rope, sin + t * rope, rope, rope, out);
                else
                    std::memcpy(out, x, sizeof(float) * rope);
            };
            for (int64_t t = begin * CHUNK; t < last; ++t) {
                for (int64_t h = 0; h < heads; ++h)
                    turn(q + t * q_token + h * (nope + rope) + nope, t, query + (t * heads + h) * width + rank);
                if (t >= num_written || slots[t] < 0) continue;  // padding, or another rank keeps it
                norm_row(latent + t * latent_token, norm, 0.0f, eps, rank, line);
                turn(latent + t * latent_token + rank, t, line + rank);
                cells.write(slots[t], line);
            }
        });
    });
}

void per_head(const float* x, int64_t x_token, int64_t x_head, const void* weight, int type, float* out,
              int64_t out_token, int64_t out_head, int64_t tokens, int64_t heads, int64_t inner, int64_t outputs) {
    const int64_t size = inner * outputs;
    // Pieces of a head's tokens, where there are fewer heads than threads.
    const int64_t pieces = heads < 4 * num_threads() && tokens >= 8 * TOKENS ? 8 : 1;
    const int64_t step = (tokens + pieces - 1) / pieces;
    parallel(heads * pieces, 1 + 8192 / (size * (tokens < 16 ? tokens : 16) + 1), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t h = i / pieces, first = i % pieces * step;
            const int64_t count = tokens - first < step ? tokens - first : step;
            if (count <= 0) continue;
            const auto run = [&](auto* kind) {
                using Matrix = std::remove_pointer_t<decltype(kind)>;
                const Matrix w((const char*)weight + h * Matrix::bytes(inner, outputs), inner, outputs);
                multiply_head(x + first * x_token + h * x_head, x_token, w, out + first * out_token + h * out_head,
                              out_token, count, inner, outputs);
            };
            if (type == UP_FLOAT16)
                run((Floats<Float16>*)nullptr);
            else if (type == UP_BFLOAT16)
                run((Floats<BFloat16>*)nullptr);
            else if (type == UP_CODES)
                run((CodesAndScales*)nullptr);
            else
                run((Floats<Float32>*)nullptr);
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
