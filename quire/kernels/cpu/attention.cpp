// Paged attention for mixed batches.
//
// A query's keys are taken in tiles of TILE at absolute positions. Each tile gives a maximum, a sum and a weighted sum of
// values on its own; these are merged in order of position. Keys that a query must not see weigh exactly zero. So neither
// the batch, nor how a sequence was cut into steps, nor how the work is shared can change a bit.
#include "kv_cache.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int TILE = 64;
constexpr int TILE_VECTORS = TILE / LANES;
constexpr int MAX_ROWS = 6;                          // query rows whose sums are in registers together
constexpr int COLUMNS = LANES == 16 ? 4 : 2;         // vectors of keys, or of a value, beside them
constexpr int QUERY_ROWS = 96;                       // aim for the query rows that share one unpacked tile
constexpr int DIRECT_ROWS = 12;                      // so few rows read the cache in place
constexpr int SPLIT_ROWS = 16;                       // up to so many query rows may share their keys among threads
constexpr float NOTHING = -INFINITY;

struct Shape {
    const float* q;           // [tokens, heads, dim]
    const int32_t* tables;    // [max_rows, table_stride]
    const int64_t* rows;      // [num_rows] line of `tables`
    const int32_t* contexts;  // [num_rows] KV length after the step
    const int32_t* starts;    // [num_rows + 1] first token of each row
    float* out;               // [tokens, heads, dim]
    int64_t num_rows, table_stride, heads, kv_heads, dim, window;
    float scale, soft_cap;

    int64_t group() const { return heads / kv_heads; }
    int64_t padded_dim() const { return (dim + 15) / 16 * 16; }
};

// Some consecutive tokens of one row, with the query heads of one KV head: `count` = tokens * group query rows.
struct Unit {
    int32_t row, first_token, num_tokens, kv_head;
    int32_t first_tile, num_tiles;
};

// The running result of query rows.
struct State {
    float *highest, *total, *sums;  // [count], [count], [count, padded_dim]
    static int64_t size(int64_t count, int64_t padded) { return count * (padded + 2); }
    static State at(float* memory, int64_t count, int64_t padded) {
        return {memory + count * padded, memory + count * padded + count, memory};
    }
    void clear(int64_t count, int64_t padded) const {
        std::memset(sums, 0, sizeof(float) * count * padded);
        for (int64_t i = 0; i < count; ++i) highest[i] = NOTHING, total[i] = 0;
    }
};

// --------------------------------------------------------------------------------------------------------- tiles
// Where the keys and values of one tile are: in the cache, or unpacked to float32 for many query rows.
template <class Format>
struct Tile {
    using Element = typename Format::Element;
    const Element* column[TILE_VECTORS];  // LANES neighbouring keys; the next dimension is `stride` elements on
    int64_t stride;
    const Element* line[TILE];                        // a value
    const float *key_scales = nullptr, *value_scales = nullptr;  // [TILE] if the cache has them
};

template <class Format>
void gather_scales(const Cells<Format>& cells, const int32_t* table, int64_t head, int64_t begin, int64_t end,
                   float* key_scales, float* value_scales) {
    if constexpr (Format::SCALED) {
        std::memset(key_scales, 0, sizeof(float) * TILE);
        std::memset(value_scales, 0, sizeof(float) * TILE);
        for (int64_t k = begin; k < end; ++k) {
            const int64_t block = table[k / cells.block_size], token = k % cells.block_size;
            key_scales[k % TILE] = cells.scale(cells.keys(block, head), token);
            value_scales[k % TILE] = cells.scale(cells.values(block, head), token);
        }
    }
}

// The tile as it lies in the cache. Columns without a key in [begin, end) repeat another: nobody looks at them.
template <class Format>
void locate(const Cells<Format>& cells, const int32_t* table, int64_t head, int64_t begin, int64_t end, Tile<Format>& tile) {
    const int64_t size = cells.block_size, start = begin / TILE * TILE;
    tile.stride = size;
    for (int c = 0; c < TILE_VECTORS; ++c) {
        int64_t position = start + c * LANES;
        if (position >= end || position + LANES <= begin) position = begin / LANES * LANES;
        tile.column[c] = cells.keys(table[position / size], head) + position % size;
    }
    for (int64_t k = begin; k < end;) {
        const auto* values = cells.values(table[k / size], head);
        const int64_t last = (k / size + 1) * size < end ? (k / size + 1) * size : end;
        for (; k < last; ++k) tile.line[k - start] = values + k % size * cells.dim;
    }
}

// A copy in float32: keys [dim, TILE] and values [TILE, padded].
template <class Format>
void unpack(const Cells<Format>& cells, const int32_t* table, int64_t head, int64_t begin, int64_t end, int64_t padded,
            float* keys, float* values, Tile<Float32>& tile) {
    using Element = typename Format::Element;
    const int64_t dim = cells.dim, size = cells.block_size, start = begin / TILE * TILE;
    const auto copy = [](const Element* from, float* to, int64_t count) {
        map(count, [&](int64_t i, int n) {
            if (n == LANES) return store(to + i, Format::read(from + i));
            Element lanes[LANES] = {};
            std::memcpy(lanes, from + i, sizeof(Element) * n);
            put(to + i, Format::read(lanes), n);
        });
    };
    for (int64_t position = begin / size * size; position < end; position += size) {
        const int64_t from = position < start ? start : position;
        const int64_t to = position + size < start + TILE ? position + size : start + TILE;
        const Element* source = cells.keys(table[position / size], head) + (from - position);
        float* target = keys + from - start;
        for (int64_t d = 0; d < dim; ++d) copy(source + d * size, target + d * TILE, to - from);
        source = cells.values(table[position / size], head);
        for (int64_t k = from < begin ? begin : from; k < to && k < end; ++k) {
            copy(source + (k - position) * dim, values + (k - start) * padded, dim);
            for (int64_t i = dim; i < padded; ++i) values[(k - start) * padded + i] = 0;
        }
    }
    tile.stride = TILE;
    for (int c = 0; c < TILE_VECTORS; ++c) tile.column[c] = keys + c * LANES;
    for (int k = 0; k < TILE; ++k) tile.line[k] = values + k * padded;
}

// -------------------------------------------------------------------------------------------------- query rows
template <int ROWS, class Format>
inline void score(const float* q, int64_t dim, const Tile<Format>& tile, int64_t num_vectors, float* scores) {
    for (int64_t first = 0; first < num_vectors; first += COLUMNS) {
        Vec acc[ROWS][COLUMNS];
        const typename Format::Element* column[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) column[c] = tile.column[first + c];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) acc[r][c] = zero();
        for (int64_t d = 0; d < dim; ++d) {
            Vec key[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) key[c] = Format::read(column[c] + d * tile.stride);
            for (int r = 0; r < ROWS; ++r) {
                const Vec x = set(q[r * dim + d]);
                for (int c = 0; c < COLUMNS; ++c) acc[r][c] = fma(x, key[c], acc[r][c]);
            }
        }
        for (int c = 0; c < COLUMNS; ++c) {
            const int64_t at = (first + c) * LANES;
            const Vec scale = tile.key_scales ? load(tile.key_scales + at) : set(1.0f);
            for (int r = 0; r < ROWS; ++r)
                store(scores + r * TILE + at, tile.key_scales ? mul(acc[r][c], scale) : acc[r][c]);
        }
    }
}

inline void cap_scores(float* scores, int64_t num_vectors, float soft_cap) {
    const Vec cap = set(soft_cap), twice = set(2 * soft_cap), factor = set(2 / soft_cap), one = set(1.0f);
    for (int64_t i = 0; i < num_vectors * LANES; i += LANES)
        store(scores + i, sub(cap, div(twice, add(exp(mul(load(scores + i), factor)), one))));
}

// Scores of one row become weights; those outside [low, high) become zero. Returns (maximum, sum of weights).
struct Weights {
    float highest, total;
};
inline Weights weigh(float* scores, int64_t low, int64_t high, int64_t num_vectors, const float* value_scales) {
    for (int64_t i = 0; i < low; ++i) scores[i] = NOTHING;
    for (int64_t i = high; i < num_vectors * LANES; ++i) scores[i] = NOTHING;
    Vec most = load(scores);
    for (int64_t i = 1; i < num_vectors; ++i) most = vmax(most, load(scores + i * LANES));
    const float highest = max_lane(most);
    const Vec shift = set(highest);
    Sum16 sums;
    for (int64_t i = 0; i < num_vectors; ++i) {
        const Vec weight = exp_or_zero(sub(load(scores + i * LANES), shift));
        store(scores + i * LANES, value_scales ? mul(weight, load(value_scales + i * LANES)) : weight);
        sums.part[i % Sum16::PARTS] = add(sums.part[i % Sum16::PARTS], weight);
    }
    return {highest, sums.total()};
}

inline float exp_of(float x) {
    float lanes[LANES];
    store(lanes, exp_or_zero(set(x)));
    return lanes[0];
}

// How a merged result is made of two: both multiplied by these.
struct Factors {
    float old_one, new_one;
};
inline Factors join(float& highest, float& total, Weights added) {
    const float both = highest > added.highest ? highest : added.highest;
    const Factors factors{highest == both ? 1.0f : exp_of(highest - both),
                          added.highest == both ? 1.0f : exp_of(added.highest - both)};
    total = std::fma(total, factors.old_one, added.total * factors.new_one);
    highest = both;
    return factors;
}

template <int ROWS, int WIDTH, class Format>
inline void add_columns(const float* weights, const Tile<Format>& tile, int64_t low, int64_t high, int64_t d,
                        int64_t padded, const Factors* factors, float* sums) {
    Vec acc[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < WIDTH; ++c) acc[r][c] = zero();
    for (int64_t k = low; k < high; ++k) {
        Vec value[WIDTH];
        for (int c = 0; c < WIDTH; ++c) value[c] = Format::read(tile.line[k] + d + c * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const Vec weight = set(weights[r * TILE + k]);
            for (int c = 0; c < WIDTH; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        const Vec old_one = set(factors[r].old_one), new_one = set(factors[r].new_one);
        for (int c = 0; c < WIDTH; ++c) {
            float* sum = sums + r * padded + d + c * LANES;
            store(sum, fma(load(sum), old_one, mul(acc[r][c], new_one)));
        }
    }
}

template <int ROWS, class Format>
inline void add_values(const float* weights, const Tile<Format>& tile, int64_t low, int64_t high, int64_t padded,
                       const Factors* factors, float* sums) {
    int64_t d = 0;
    for (; d + COLUMNS * LANES <= padded; d += COLUMNS * LANES)
        add_columns<ROWS, COLUMNS>(weights, tile, low, high, d, padded, factors, sums);
    for (; d < padded; d += LANES) add_columns<ROWS, 1>(weights, tile, low, high, d, padded, factors, sums);
}

// What `count` query rows, starting with row `first` of the unit, get from one tile.
template <class Format>
struct TileWork {
    const float* q;  // [count of the unit, dim], scaled
    const Tile<Format>& data;
    int64_t tile, dim, padded, group, window, position;  // position: of the unit's first token
    float soft_cap;
};

template <class Format>
TileWork(const float*, const Tile<Format>&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float)
    -> TileWork<Format>;

template <int ROWS, class Format>
void attend_rows(const TileWork<Format>& work, int64_t first, State state) {
    int64_t low[ROWS], high[ROWS], least = TILE, most = 0;
    for (int r = 0; r < ROWS; ++r) {
        const int64_t position = work.position + (first + r) / work.group - work.tile;
        low[r] = work.window > 0 && position - work.window + 1 > 0 ? position - work.window + 1 : 0;
        high[r] = position + 1 < TILE ? position + 1 : TILE;
        if (low[r] >= high[r]) continue;
        least = low[r] < least ? low[r] : least;
        most = high[r] > most ? high[r] : most;
    }
    if (least >= most) return;
    alignas(64) float scores[ROWS * TILE];
    const int64_t num_vectors = (most + COLUMNS * LANES - 1) / (COLUMNS * LANES) * COLUMNS;
    score<ROWS>(work.q + first * work.dim, work.dim, work.data, num_vectors, scores);
    Factors factors[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        float* line = scores + r * TILE;
        if (low[r] >= high[r]) {  // this row sees nothing of the tile
            std::memset(line, 0, sizeof(float) * TILE);
            factors[r] = {1.0f, 0.0f};
            continue;
        }
        if (work.soft_cap > 0) cap_scores(line, num_vectors, work.soft_cap);
        const Weights added = weigh(line, low[r], high[r], num_vectors, work.data.value_scales);
        factors[r] = join(state.highest[first + r], state.total[first + r], added);
    }
    add_values<ROWS>(scores, work.data, least, most, work.padded, factors, state.sums + first * work.padded);
}

template <class Format>
void attend_tile(const TileWork<Format>& work, int64_t count, State state) {
    int64_t first = 0;
    if constexpr (sizeof(typename Format::Element) == sizeof(float))  // what unpacked tiles are
        for (; first + MAX_ROWS <= count; first += MAX_ROWS) attend_rows<MAX_ROWS>(work, first, state);
    for (; first + 4 <= count && count - first != 6; first += 4) attend_rows<4>(work, first, state);
    for (; first + 3 <= count; first += 3) attend_rows<3>(work, first, state);
    for (; first < count; ++first) attend_rows<1>(work, first, state);
}

// --------------------------------------------------------------------------------------------------------- units
int64_t first_position(const Shape& shape, const Unit& unit) {
    return shape.contexts[unit.row] - (shape.starts[unit.row + 1] - unit.first_token);
}

void gather_queries(const Shape& shape, const Unit& unit, float* q) {
    const int64_t width = shape.group() * shape.dim;
    const Vec scale = set(shape.scale);
    for (int64_t t = 0; t < unit.num_tokens; ++t) {
        const float* source = shape.q + ((unit.first_token + t) * shape.heads + unit.kv_head * shape.group()) * shape.dim;
        map(width, [&](int64_t i, int n) { put(q + t * width + i, mul(get(source + i, n), scale), n); });
    }
}

// Tiles [first, last) of a unit into one state, or, if `apart`, each tile into its own state, one after the other.
template <class Format>
void run_tiles(const Shape& shape, const Cells<Format>& cells, const Unit& unit, int64_t first, int64_t last,
               float* memory, bool apart) {
    const int64_t padded = shape.padded_dim(), count = unit.num_tokens * shape.group();
    float* q = (float*)scratch(0, sizeof(float) * count * shape.dim);
    float* keys = (float*)scratch(1, sizeof(float) * TILE * (shape.dim + padded + 2));
    float *values = keys + TILE * shape.dim, *scales = values + TILE * padded;
    gather_queries(shape, unit, q);
    const bool direct = count <= DIRECT_ROWS && shape.dim == padded && cells.block_size % LANES == 0;
    const int64_t position = first_position(shape, unit), end = position + unit.num_tokens;
    const int64_t begin = shape.window > 0 && position - shape.window + 1 > 0 ? position - shape.window + 1 : 0;
    const int32_t* table = shape.tables + shape.rows[unit.row] * shape.table_stride;
    for (int64_t index = first; index < last; ++index) {
        const int64_t start = index * TILE, from = start < begin ? begin : start;
        const int64_t to = start + TILE < end ? start + TILE : end;
        gather_scales(cells, table, unit.kv_head, from, to, scales, scales + TILE);
        const State state = State::at(memory, count, padded);
        const auto attend = [&](auto& tile) {
            if (Format::SCALED) tile.key_scales = scales, tile.value_scales = scales + TILE;
            const TileWork work{q, tile, start, shape.dim, padded, shape.group(), shape.window, position, shape.soft_cap};
            attend_tile(work, count, state);
        };
        if (direct) {
            Tile<Format> tile;
            locate(cells, table, unit.kv_head, from, to, tile);
            attend(tile);
        } else {
            Tile<Float32> tile;
            unpack(cells, table, unit.kv_head, from, to, padded, keys, values, tile);
            attend(tile);
        }
        if (apart) memory += State::size(count, padded);
    }
}

void write_out(const Shape& shape, const Unit& unit, State state) {
    const int64_t padded = shape.padded_dim(), group = shape.group();
    for (int64_t i = 0; i < unit.num_tokens * group; ++i) {
        const int64_t token = unit.first_token + i / group, head = unit.kv_head * group + i % group;
        float* out = shape.out + (token * shape.heads + head) * shape.dim;
        const Vec total = set(state.total[i]);
        const float* sums = state.sums + i * padded;
        map(shape.dim, [&](int64_t d, int n) { put(out + d, div(get(sums + d, n), total), n); });
    }
}

template <class Format>
void run_unit(const Shape& shape, const Cells<Format>& cells, const Unit& unit) {
    const int64_t padded = shape.padded_dim(), count = unit.num_tokens * shape.group();
    float* memory = (float*)scratch(2, sizeof(float) * State::size(count, padded));
    const State state = State::at(memory, count, padded);
    state.clear(count, padded);
    run_tiles(shape, cells, unit, unit.first_tile, unit.first_tile + unit.num_tiles, memory, false);
    write_out(shape, unit, state);
}

// Merge the states of a unit's tiles, in order, into the first one.
void merge_tiles(const Shape& shape, const Unit& unit, float* memory) {
    const int64_t padded = shape.padded_dim(), count = unit.num_tokens * shape.group();
    const State merged = State::at(memory, count, padded);
    for (int64_t tile = 1; tile < unit.num_tiles; ++tile) {
        const State part = State::at(memory + tile * State::size(count, padded), count, padded);
        for (int64_t i = 0; i < count; ++i) {
            if (part.total[i] == 0) continue;  // the row saw nothing of this tile
            const Factors factors = join(merged.highest[i], merged.total[i], {part.highest[i], part.total[i]});
            const Vec old_one = set(factors.old_one), new_one = set(factors.new_one);
            for (int64_t d = 0; d < padded; d += LANES) {
                float* sum = merged.sums + i * padded + d;
                store(sum, fma(load(sum), old_one, mul(load(part.sums + i * padded + d), new_one)));
            }
        }
    }
    write_out(shape, unit, merged);
}

int64_t make_units(const Shape& shape, Unit* units) {
    const int64_t tokens_per_unit = QUERY_ROWS / shape.group() > 0 ? QUERY_ROWS / shape.group() : 1;
    int64_t count = 0;
    for (int64_t row = 0; row < shape.num_rows; ++row) {
        // The last tokens first: they have the most keys, and large pieces of work should not come last.
        for (int64_t end = shape.starts[row + 1]; end > shape.starts[row]; end -= tokens_per_unit) {
            const int64_t first = end - tokens_per_unit > shape.starts[row] ? end - tokens_per_unit : shape.starts[row];
            Unit unit{(int32_t)row, (int32_t)first, (int32_t)(end - first), 0, 0, 0};
            const int64_t position = first_position(shape, unit);
            const int64_t seen = shape.window > 0 && position - shape.window + 1 > 0 ? position - shape.window + 1 : 0;
            unit.first_tile = (int32_t)(seen / TILE);
            unit.num_tiles = (int32_t)((position + unit.num_tokens - 1) / TILE + 1 - unit.first_tile);
            for (int64_t head = 0; head < shape.kv_heads; ++head) {
                unit.kv_head = (int32_t)head;
                units[count++] = unit;
            }
        }
    }
    return count;
}

// Few units with many keys: threads share the tiles, then the tiles of each unit are merged in order.
template <class Format>
void run_split(const Shape& shape, const Cells<Format>& cells, const Unit* units, int64_t count) {
    const int64_t padded = shape.padded_dim();
    int64_t* offsets = (int64_t*)scratch(4, sizeof(int64_t) * 2 * (count + 1));
    int64_t* first_item = offsets + count + 1;
    offsets[0] = first_item[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t size = State::size(units[i].num_tokens * shape.group(), padded);
        offsets[i + 1] = offsets[i] + size * units[i].num_tiles;
        first_item[i + 1] = first_item[i] + units[i].num_tiles;
    }
    float* memory = (float*)scratch(5, sizeof(float) * offsets[count]);
    parallel(first_item[count], 1, [&](int64_t begin, int64_t end) {
        int64_t i = 0;
        while (begin < end) {
            while (first_item[i + 1] <= begin) ++i;
            const int64_t last = first_item[i + 1] < end ? first_item[i + 1] : end;
            const int64_t rows = units[i].num_tokens * shape.group(), size = State::size(rows, padded);
            float* states = memory + offsets[i] + (begin - first_item[i]) * size;
            for (int64_t t = 0; t < last - begin; ++t) State::at(states + t * size, rows, padded).clear(rows, padded);
            run_tiles(shape, cells, units[i], units[i].first_tile + begin - first_item[i],
                      units[i].first_tile + last - first_item[i], states, true);
            begin = last;
        }
    });
    parallel(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) merge_tiles(shape, units[i], memory + offsets[i]);
    });
}

}  // namespace

void attention(const float* q, const void* cache, const int32_t* tables, const int64_t* rows, const int32_t* contexts,
               const int32_t* starts, float* out, int64_t num_rows, int64_t table_stride, int64_t value_offset,
               int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t window, int kv_type, float scale,
               float soft_cap) {
    if (num_rows == 0) return;
    const Shape shape{q,        tables,       rows,  contexts, starts, out,   num_rows,
                      table_stride, heads, kv_heads, dim,    window, scale, soft_cap};
    Unit* units = (Unit*)scratch(3, sizeof(Unit) * (starts[num_rows] - starts[0]) * kv_heads);
    const int64_t count = make_units(shape, units);
    int64_t most_rows = 0, tiles = 0;
    for (int64_t i = 0; i < count; ++i) {
        most_rows = units[i].num_tokens * shape.group() > most_rows ? units[i].num_tokens * shape.group() : most_rows;
        tiles += units[i].num_tiles;
    }
    const bool split = count < 8 * num_threads() && tiles >= 2 * count && most_rows <= SPLIT_ROWS && num_threads() > 1;
    with_format(kv_type, [&](auto format) {
        using Format = decltype(format);
        const Cells<Format> cells{(char*)const_cast<void*>(cache), value_offset, kv_heads, dim, block_size};
        if (split) return run_split(shape, cells, units, count);
        // Very little work is done by one thread: waking another takes longer.
        const int64_t grain = 1 + 8192 / (tiles * TILE * dim / count * (most_rows + 2) / 64 + 1);
        parallel(count, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) run_unit(shape, cells, units[i]);
        });
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
