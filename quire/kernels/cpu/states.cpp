// Recurrent layers: convolutions and matrices per head that tokens are folded into, one after the other. See
// ops/states.py for the layout of a state.
#include "gate.h"
#include "norm.h"
#include "plan.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int CHUNK_VECS = 4;
constexpr int64_t CHUNK = CHUNK_VECS * LANES;  // columns of a matrix that a thread folds tokens into
constexpr int MOST_TAPS = 8;
constexpr int MOST_AT_ONCE = 5;       // tokens that are folded in one pass: those that wait and a new one
constexpr int64_t AHEAD = 2048;       // floats of a matrix that are fetched before they are needed

struct Places {
    const int32_t* tables;
    int64_t table_stride;
    const int64_t* rows;
    const int32_t *contexts, *starts;
    int64_t num_rows, block_size;

    // f(begin, first, count, read, table) of each row that has tokens; read is the block that it goes on from.
    template <class F>
    void each(const F& f) const {
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t begin = starts[r], count = starts[r + 1] - begin, first = contexts[r] - count;
            const int32_t* table = tables + rows[r] * table_stride;
            if (count > 0) f(begin, first, count, first > 0 ? (int64_t)table[(first - 1) / block_size] : 0, table);
        }
    }

    // f(end, block) of each state that a row is to leave, after `end` tokens.
    template <class F>
    void each_write(const int32_t* table, int64_t first, int64_t context, const F& f) const {
        for (int64_t entry = first / block_size; entry * block_size < context; ++entry) {
            const int64_t end = (entry + 1) * block_size < context ? (entry + 1) * block_size : context;
            if (table[entry]) f(end, (int64_t)table[entry]);
        }
    }
};

// Whether a state that was left after `base` tokens and is left again, one later, keeps its matrix: what came since waits
// in the ring. A matrix is large beside the inputs of a token, and folding these anew costs less than writing it. Rows of
// more tokens write theirs: of such rows a trial step may have several in one block (runner/kernel_list.py).
static inline bool keeps_matrix(const Places& places, int64_t block, int64_t read, int64_t first, int64_t base,
                                int64_t waiting) {
    const bool one_each = places.starts[places.num_rows] - places.starts[0] == places.num_rows;
    return one_each && block == read && base < first && first + 1 - base <= waiting;
}

static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static inline float softplus(float x) { return (x > 0.0f ? x : 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// A token's part in one head's matrix.
struct Token {
    const float *key, *value, *decay;
    float strength;
};

// N vectors of columns of a matrix [key_dim, stride], or of one `lanes`: fold one token in, and read with a query if
// there is one.
template <int N, bool DELTA>
static inline void fold(float* matrix, int64_t stride, int64_t key_dim, bool by_row, const Token& token, int64_t column,
                        const float* query, float* out, int lanes = LANES) {
    const auto load = [&](const float* p) { return N == 1 ? get(p, lanes) : QUIRE_NS::load(p); };
    const auto store = [&](float* p, Vec v) { N == 1 ? put(p, v, lanes) : QUIRE_NS::store(p, v); };
    Vec added[N], read[N];
    for (int i = 0; i < N; ++i) added[i] = load(token.value + column + i * LANES), read[i] = zero();
    if (DELTA) {
        Vec had[N];
        for (int i = 0; i < N; ++i) had[i] = zero();
        for (int64_t k = 0; k < key_dim; ++k) {
            const Vec weight = set(token.decay[by_row ? k : 0] * token.key[k]);
            for (int i = 0; i < N; ++i) had[i] = fma(load(matrix + k * stride + i * LANES), weight, had[i]);
        }
        const Vec strength = set(token.strength);
        for (int i = 0; i < N; ++i) added[i] = mul(sub(added[i], had[i]), strength);
    }
    for (int64_t k = 0; k < key_dim; ++k) {
        const Vec decay = set(token.decay[by_row ? k : 0]), key = set(token.key[k]);
        const Vec asked = set(query ? query[k] : 0.0f);
        for (int i = 0; i < N; ++i) {
            float* p = matrix + k * stride + i * LANES;
            const Vec v = fma(key, added[i], mul(load(p), decay));
            store(p, v);
            read[i] = fma(v, asked, read[i]);
        }
    }
    if (query)
        for (int i = 0; i < N; ++i) store(out + i * LANES, read[i]);
}

// The same of COUNT tokens, which are folded into `from` in one pass, their values in registers; the last has the query, and
// the matrix before it goes to `left`, if that is wanted. There is no delta rule: each element goes on by itself.
template <int N, int COUNT>
static inline void fold_at_once(const float* from, int64_t stride, float* left, int64_t left_stride, int64_t key_dim,
                                const Token* tokens, int64_t column, const float* query, float* out) {
    Vec read[N], value[COUNT][N], decay[COUNT];
    const float* key[COUNT];
    for (int t = 0; t < COUNT; ++t) {
        decay[t] = set(*tokens[t].decay), key[t] = tokens[t].key;
        for (int i = 0; i < N; ++i) value[t][i] = load(tokens[t].value + column + i * LANES);
    }
    for (int i = 0; i < N; ++i) read[i] = zero();
    for (int64_t k = 0; k < key_dim; ++k, from += stride, left += left ? left_stride : 0) {
        Vec v[N];
        for (int i = 0; i < N; ++i) v[i] = load(from + i * LANES), fetch(from + AHEAD + i * LANES);
        for (int t = 0; t < COUNT; ++t) {
            if (left && t + 1 == COUNT)
                for (int i = 0; i < N; ++i) store(left + i * LANES, v[i]);
            const Vec factor = set(key[t][k]);
            for (int i = 0; i < N; ++i) v[i] = fma(factor, value[t][i], mul(v[i], decay[t]));
        }
        const Vec asked = set(query[k]);
        for (int i = 0; i < N; ++i) read[i] = fma(v[i], asked, read[i]);
    }
    for (int i = 0; i < N; ++i) store(out + column + i * LANES, read[i]);
}

// The same of one column whose rows are decayed each by itself.
static inline void fold_column(float* matrix, int64_t key_dim, const Token& token, int64_t column, const float* query,
                               float* out) {
    const Vec value = set(token.value[column]);
    Vec read = zero();
    map(key_dim, [&](int64_t k, int n) {
        const Vec v = fma(get(token.key + k, n), value, mul(get(matrix + k, n), get(token.decay + k, n)));
        put(matrix + k, v, n);
        if (query) read = fma(v, get(query + k, n), read);
    });
    if (query) *out = sum(read);
}

}  // namespace

void short_conv(const float* x, const float* before, const float* after, int64_t stride, const float* weight,
                const float* bias, float* cache, int64_t cache_stride, const int32_t* tables, int64_t table_stride,
                const int64_t* rows, const int32_t* contexts, const int32_t* starts, float* out, int64_t num_rows,
                int64_t block_size, int64_t channels, int64_t width, int64_t slots, int silu) {
    const Places places{tables, table_stride, rows, contexts, starts, num_rows, block_size};
    const Vec one = set(1.0f), minus = set(-1.0f);
    const int64_t vecs = (channels + LANES - 1) / LANES;
    parallel(vecs, 4, [&](int64_t begin_vec, int64_t end_vec) {
        for (int64_t c = begin_vec * LANES; c < end_vec * LANES && c < channels; c += LANES) {
            const int lanes = channels - c < LANES ? (int)(channels - c) : LANES;
            Vec taps[MOST_TAPS];
            for (int64_t t = 0; t < width; t += LANES) {
                const int count = (int)least(LANES, width - t);
                Vec lines[LANES];
                for (int i = 0; i < LANES; ++i) lines[i] = i < lanes ? get(weight + (c + i) * width + t, count) : zero();
                transpose(lines);
                for (int i = 0; i < count; ++i) taps[t + i] = lines[i];
            }
            const Vec shift = bias ? get(bias + c, lanes) : zero();
            const auto input = [&](int64_t token) {
                const Vec v = get(x + token * stride + c, lanes);
                return before ? mul(get(before + token * stride + c, lanes), v) : v;
            };
            places.each([&](int64_t begin, int64_t first, int64_t count, int64_t read, const int32_t* table) {
                const float* ring = cache + read * cache_stride + c;
                Vec line[MOST_TAPS];
                for (int64_t t = 0; t + 1 < width; ++t) {
                    const int64_t position = first - width + 1 + t;
                    line[t] = position < 0 ? zero() : get(ring + position % slots * channels, lanes);
                }
                for (int64_t token = begin; token < begin + count; ++token) {
                    line[width - 1] = input(token);
                    Vec total = zero();
                    for (int64_t t = 0; t < width; ++t) total = fma(line[t], taps[t], total);
                    total = add(total, shift);
                    if (silu) total = div(total, add(one, exp(mul(total, minus))));
                    if (after) total = mul(get(after + token * stride + c, lanes), total);
                    put(out + token * channels + c, total, lanes);
                    for (int64_t t = 0; t + 1 < width; ++t) line[t] = line[t + 1];
                }
                places.each_write(table, first, first + count, [&](int64_t end, int64_t block) {
                    float* kept = cache + block * cache_stride + c;
                    for (int64_t p = most(0, end - slots); p < end; ++p) {
                        if (p < first && block == read) continue;
                        const Vec v = p < first ? get(ring + p % slots * channels, lanes) : input(begin + p - first);
                        put(kept + p % slots * channels, v, lanes);
                    }
                });
            });
        }
    });
}

void recurrence(const float* queries, int64_t query_stride, const float* keys, int64_t key_stride, const float* values,
                int64_t value_stride, const float* decays, const float* strengths, const float* skip, const float* skipped,
                int64_t skipped_stride, float* cache, int64_t cache_stride, const int32_t* tables, int64_t table_stride,
                const int64_t* rows, const int32_t* contexts, const int32_t* starts, float* out, int64_t num_rows,
                int64_t block_size, int64_t heads, int64_t key_heads, int64_t key_dim, int64_t value_dim,
                int64_t decay_dim, int64_t rollback, int64_t waiting) {
    const Places places{tables, table_stride, rows, contexts, starts, num_rows, block_size};
    const int64_t repeats = heads / key_heads, width = heads * value_dim, matrix_size = heads * key_dim * value_dim;
    const int64_t of_keys = key_heads * key_dim, of_decays = heads * decay_dim, tasks = (value_dim + CHUNK - 1) / CHUNK;
    const int64_t ring_width = of_keys + width + of_decays + heads;
    parallel(heads * tasks, 1 + 16384 / (1 + key_dim * value_dim), [&](int64_t begin_task, int64_t end_task) {
        for (int64_t task = begin_task; task < end_task; ++task) {
            const int64_t head = task / tasks, column = task % tasks * CHUNK;
            const int64_t columns = value_dim - column < CHUNK ? value_dim - column : CHUNK;
            const bool by_row = decay_dim > 1;
            float* matrix = (float*)scratch(0, sizeof(float) * key_dim * CHUNK);
            const auto add_token = [&](const Token& token, const float* query, float* result) {
                if (value_dim == 1 && by_row && !strengths) return fold_column(matrix, key_dim, token, 0, query, result);
                for (int64_t i = 0; i < columns;) {
                    const bool whole = columns - i >= CHUNK;
                    const int n = columns - i < LANES ? (int)(columns - i) : LANES;
                    float *part = matrix + i, *there = result + column + i;
                    if (whole && strengths) fold<CHUNK_VECS, true>(part, columns, key_dim, by_row, token, column + i, query, there);
                    else if (whole) fold<CHUNK_VECS, false>(part, columns, key_dim, by_row, token, column + i, query, there);
                    else if (strengths) fold<1, true>(part, columns, key_dim, by_row, token, column + i, query, there, n);
                    else fold<1, false>(part, columns, key_dim, by_row, token, column + i, query, there, n);
                    i += whole ? CHUNK : LANES;
                }
            };
            places.each([&](int64_t begin, int64_t first, int64_t count, int64_t read, const int32_t* table) {
                const int64_t place = head * key_dim * value_dim + column;
                const float* state = cache + read * cache_stride;
                const int64_t base = first > 0 && state[0] < first ? (int64_t)state[0] : first;
                const auto waited = [&](int64_t p) {
                    const float* kept = state + 1 + matrix_size + p % rollback * ring_width;
                    const float *v = kept + of_keys, *d = v + width;
                    return Token{kept + head / repeats * key_dim, v + head * value_dim, d + head * decay_dim,
                                 d[of_decays + head]};
                };
                const auto given = [&](int64_t token) {
                    return Token{keys + token * key_stride + head / repeats * key_dim,
                                 values + token * value_stride + head * value_dim,
                                 decays + token * of_decays + head * decay_dim,
                                 strengths ? strengths[token * heads + head] : 0.0f};
                };
                const auto leave = [&](int64_t block) {
                    float* left = cache + block * cache_stride + 1 + place;
                    if (columns == value_dim) return (void)std::memcpy(left, matrix, sizeof(float) * key_dim * columns);
                    for (int64_t k = 0; k < key_dim; ++k)
                        std::memcpy(left + k * value_dim, matrix + k * columns, sizeof(float) * columns);
                };
                const auto add_skipped = [&](int64_t token, float* result) {
                    for (int64_t i = column; skip && i < column + columns; ++i)
                        result[i] += skip[head] * skipped[token * skipped_stride + head * value_dim + i];
                };
                const bool at_once = count == 1 && first > 0 && !strengths && !by_row && columns % LANES == 0;
                if (at_once && first - base < MOST_AT_ONCE) {
                    Token tokens[MOST_AT_ONCE];
                    for (int64_t p = base; p < first; ++p) tokens[p - base] = waited(p);
                    tokens[first - base] = given(begin);
                    const int64_t block = table[first / block_size];
                    const bool leaves = block && !keeps_matrix(places, block, read, first, base, waiting);
                    const float* query = queries + begin * query_stride + head / repeats * key_dim;
                    float *left = leaves ? matrix : nullptr, *result = out + begin * width + head * value_dim;
                    const float* from = state + 1 + place;
                    with_rows<MOST_AT_ONCE>(first - base + 1, [&](auto number) {
                        constexpr int COUNT = decltype(number)::value;
                        for (int64_t i = 0; i < columns;) {
                            const bool two = columns - i >= 2 * LANES;
                            const auto run = two ? fold_at_once<2, COUNT> : fold_at_once<1, COUNT>;
                            run(from + i, value_dim, left ? left + i : left, columns, key_dim, tokens, column + i, query,
                                result);
                            i += two ? 2 * LANES : LANES;
                        }
                    });
                    if (leaves) leave(block);  // states lie at odd addresses, where vectors are stored slowly
                    return add_skipped(begin, result);
                }
                for (int64_t k = 0; k < key_dim; ++k)
                    for (int64_t i = 0; i < columns; ++i)
                        matrix[k * columns + i] = first > 0 ? state[1 + place + k * value_dim + i] : 0.0f;
                for (int64_t p = base; p < first; ++p) add_token(waited(p), nullptr, out);
                int64_t entry = first / block_size;  // whose state is the next to be left
                for (int64_t t = 0; t < count; ++t) {
                    for (;; ++entry) {
                        const int64_t end = (entry + 1) * block_size < first + count ? (entry + 1) * block_size : first + count;
                        if (entry * block_size >= first + count || most(first, end - rollback) > first + t) break;
                        if (!table[entry] || keeps_matrix(places, table[entry], read, first, base, waiting)) continue;
                        leave(table[entry]);
                    }
                    const int64_t token = begin + t;
                    float* result = out + token * width + head * value_dim;
                    add_token(given(token), queries + token * query_stride + head / repeats * key_dim, result);
                    add_skipped(token, result);
                }
            });
        }
    });
}

void keep_inputs(const float* keys, int64_t key_stride, const float* values, int64_t value_stride, const float* decays,
                 const float* strengths, float* cache, int64_t cache_stride, const int32_t* tables, int64_t table_stride,
                 const int64_t* rows, const int32_t* contexts, const int32_t* starts, int64_t num_rows,
                 int64_t block_size, int64_t heads, int64_t of_keys, int64_t of_values, int64_t of_decays,
                 int64_t matrix_size, int64_t rollback, int64_t waiting) {
    const Places places{tables, table_stride, rows, contexts, starts, num_rows, block_size};
    const int64_t ring_width = of_keys + of_values + of_decays + heads;
    places.each([&](int64_t begin, int64_t first, int64_t count, int64_t read, const int32_t* table) {
        const int64_t before = first > 0 ? (int64_t)cache[read * cache_stride] : 0;
        places.each_write(table, first, first + count, [&](int64_t end, int64_t block) {
            float* state = cache + block * cache_stride;
            const int64_t base = most(first, end - rollback);
            if (!keeps_matrix(places, block, read, first, before, waiting)) state[0] = (float)base;
            for (int64_t p = base; p < end; ++p) {
                float* kept = state + 1 + matrix_size + p % rollback * ring_width;
                const int64_t token = begin + p - first;
                std::memcpy(kept, keys + token * key_stride, sizeof(float) * of_keys);
                std::memcpy(kept += of_keys, values + token * value_stride, sizeof(float) * of_values);
                std::memcpy(kept += of_values, decays + token * of_decays, sizeof(float) * of_decays);
                kept += of_decays;
                for (int64_t h = 0; h < heads; ++h) kept[h] = strengths ? strengths[token * heads + h] : 1.0f;
            }
        });
    });
}

void delta_inputs(const float* qkv, int64_t qkv_stride, const float* decay, int64_t decay_stride,
                  const float* strength, int64_t strength_stride, const float* a, const float* dt_bias, float floor,
                  float* qk, float* decays, float* strengths, int64_t tokens, int64_t heads, int64_t key_heads,
                  int64_t key_dim, int64_t decay_dim) {
    const float scale = 1.0f / std::sqrt((float)key_dim);
    parallel(tokens, 1 + 4096 / (key_heads * key_dim), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t h = 0; h < 2 * key_heads; ++h) {
                const float* x = qkv + t * qkv_stride + h * key_dim;
                float* y = qk + (t * 2 * key_heads + h) * key_dim;
                const float squares = square_sum(key_dim, [&](int64_t i, int n) { return get(x + i, n); });
                const Vec factor = set((h < key_heads ? scale : 1.0f) / std::sqrt(squares + 1e-6f));
                map(key_dim, [&](int64_t i, int n) { put(y + i, mul(get(x + i, n), factor), n); });
            }
            const float *d = decay + t * decay_stride, *s = strength + t * strength_stride;
            for (int64_t i = 0; i < heads * decay_dim; ++i) {
                const float x = d[i] + dt_bias[i], rate = a[i / decay_dim];
                decays[t * heads * decay_dim + i] =
                    std::exp(floor < 0.0f ? floor / (1.0f + std::exp(rate * x)) : rate * softplus(x));
            }
            for (int64_t h = 0; h < heads; ++h) strengths[t * heads + h] = 1.0f / (1.0f + std::exp(-s[h]));
        }
    });
}

void scan_inputs(const float* x, int64_t x_stride, const float* dt, int64_t dt_stride, const float* dt_bias,
                 const float* a, float low, float high, float* values, float* decays, int64_t tokens, int64_t heads,
                 int64_t value_dim, int64_t decay_dim) {
    parallel(tokens, 1 + 4096 / (heads * value_dim), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t h = 0; h < heads; ++h) {
                float step = softplus(dt[t * dt_stride + h] + (dt_bias ? dt_bias[h] : 0.0f));
                step = step < low ? low : step > high ? high : step;
                const float* from = x + t * x_stride + h * value_dim;
                float* to = values + (t * heads + h) * value_dim;
                for (int64_t i = 0; i < value_dim; ++i) to[i] = from[i] * step;
                const Vec factor = set(step);
                map(decay_dim, [&](int64_t i, int n) {
                    put(decays + (t * heads + h) * decay_dim + i, exp(mul(get(a + h * decay_dim + i, n), factor)), n);
                });
            }
    });
}

void gated_norm(const float* x, const float* gate, int64_t gate_stride, const float* weight, float* out, int64_t rows,
                int64_t groups, int64_t width, int64_t weight_stride, float eps, int norm_first, int sigmoid) {
    const Vec one = set(1.0f), minus = set(-1.0f);
    parallel(rows, 1 + 8192 / (groups * width), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            for (int64_t g = 0; g < groups; ++g) {
                const float *source = x + (r * groups + g) * width, *gates = gate + r * gate_stride + g * width;
                float* y = out + (r * groups + g) * width;
                const auto factor = [&](int64_t i, int n) {
                    const Vec v = get(gates + i, n), s = div(one, add(one, exp(mul(v, minus))));
                    return sigmoid ? s : mul(s, v);
                };
                const float squares = square_sum(width, [&](int64_t i, int n) {
                    Vec v = get(source + i, n);
                    if (!norm_first) put(y + i, v = mul(v, factor(i, n)), n);
                    return v;
                });
                scale_row(norm_first ? source : y, weight + g * weight_stride, 0.0f, eps, width, squares, y);
                if (norm_first) map(width, [&](int64_t i, int n) { put(y + i, mul(get(y + i, n), factor(i, n)), n); });
            }
    });
}

void gate(const float* x, const float* gates, int64_t gate_stride, float* out, int64_t rows, int64_t width, int silu) {
    const Vec one = set(1.0f), minus = set(-1.0f);
    parallel(rows, 1 + 8192 / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            map(width, [&](int64_t i, int n) {
                const Vec v = get(gates + r * gate_stride + i, n), s = div(one, add(one, exp(mul(v, minus))));
                put(out + r * width + i, mul(get(x + r * width + i, n), silu ? mul(s, v) : s), n);
            });
    });
}

void copy_columns(const float* x, int64_t stride, float* out, int64_t rows, int64_t width) {
    parallel(rows, 1 + 8192 / width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) std::memcpy(out + r * width, x + r * stride, sizeof(float) * width);
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
