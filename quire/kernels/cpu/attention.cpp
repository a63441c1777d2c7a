// Paged attention for mixed batches.
//
// A query's keys are taken in tiles of TILE at absolute positions. Each tile gives a maximum, a sum and a weighted sum of
// values on its own; these are merged in order of position. Keys that a query must not see weigh exactly zero. So neither
// the batch, nor how a sequence was cut into steps, nor how the work is shared can change a bit.
//
// Where ranks split the tokens of a sequence, keys count what is kept here. The result is then a state of each query row,
// its sums, highest score and total, which `merge_contexts` merges over the ranks in their order.
#include "attention_tile.h"
#include "latent_cache.h"

namespace quire {
namespace QUIRE_NS {
namespace {

constexpr int QUERY_ROWS = 192;  // aim for the query rows that share one unpacked tile
constexpr int DIRECT_ROWS = 12;  // so few rows read the cache in place, whatever that costs
constexpr int EVEN_ROWS = 24;    // query rows that are still worth a unit of their own
constexpr int SPLIT_ROWS = 16;   // up to so many query rows may share their keys among threads

struct Shape {
    const float* q;           // [tokens, heads, dim]
    const int32_t* tables;    // [max_rows, table_stride]
    const int64_t* rows;      // [num_rows] line of `tables`
    const int32_t* contexts;  // [num_rows] KV length after the step
    const int32_t* starts;    // [num_rows + 1] first token of each row
    float* out;               // [tokens, heads, value_dim]
    int64_t num_rows, table_stride, heads, kv_heads, dim, value_dim, window;
    bool causal;
    float scale, soft_cap;
    const float* sinks;  // [heads] scores of keys without values, or null
    Split split;
    float value_scale = 1.0f;           // of the result
    const int32_t* attended = nullptr;  // [num_rows] first tokens of a row that are keys, where it is not causal

    int64_t group() const { return heads / kv_heads; }
    int64_t padded_dim() const { return (value_dim + 15) / 16 * 16; }
};

// Some consecutive tokens of one row, with the query heads of one KV head: `count` = tokens * group query rows.
struct Unit {
    int32_t row, first_token, num_tokens, kv_head;
    int32_t first_tile, num_tiles;
};

int64_t first_position(const Shape& shape, const Unit& unit) {
    return shape.contexts[unit.row] - (shape.starts[unit.row + 1] - unit.first_token);
}

// The first key that a token at this position sees.
int64_t first_seen(const Shape& shape, int64_t position) {
    const int64_t first = first_in_window(shape.window, position);
    return first > 0 ? shape.split.own(first) : 0;
}

// The end of the keys that a token of this row sees.
int64_t end_seen(const Shape& shape, int64_t row, int64_t position) {
    const int64_t last = shape.causal ? shape.contexts[row] : shape.attended[row];
    const int64_t ahead = shape.causal ? 1 : shape.window > 0 ? shape.window : last;
    return shape.split.own(position + ahead < last ? position + ahead : last);
}

// --------------------------------------------------------------------------------------------------------- tiles
// The keys of one tile that a unit needs: [begin, end), and where they are found.
struct Keys {
    const int32_t* table;
    int64_t head, begin, end;
    Keys(const Shape& shape, const Unit& unit, int64_t tile)
        : table(shape.tables + shape.rows[unit.row] * shape.table_stride), head(unit.kv_head) {
        const int64_t position = first_position(shape, unit), first = first_seen(shape, position);
        begin = tile * TILE < first ? first : tile * TILE;
        end = end_seen(shape, unit.row, position + unit.num_tokens - 1);
        end = (tile + 1) * TILE < end ? (tile + 1) * TILE : end;
    }
};

template <class Format>
void gather_scales(const Cells<Format>& cells, const Keys& keys, float* key_scales, float* value_scales) {
    if constexpr (Format::SCALED) {
        std::memset(key_scales, 0, sizeof(float) * TILE);
        std::memset(value_scales, 0, sizeof(float) * TILE);
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            const int64_t block = keys.table[k / cells.block_size], token = k % cells.block_size;
            key_scales[k % TILE] = cells.scale(cells.keys(block, keys.head), token);
            value_scales[k % TILE] = cells.scale(cells.values(block, keys.head), token);
        }
    }
}

// The tile as it lies in the cache. What is not of [begin, end) repeats something that is: nobody looks at it.
template <class Format>
void locate(const Cells<Format>& cells, const Keys& keys, Tile<Format>& tile) {
    const int64_t size = cells.block_size, start = keys.begin / TILE * TILE;
    tile.stride = size;
    for (int c = 0; c < TILE_VECTORS; ++c) {
        int64_t position = start + c * LANES;
        if (position >= keys.end || position + LANES <= keys.begin) position = keys.begin / LANES * LANES;
        tile.column[c] = cells.keys(keys.table[position / size], keys.head) + position % size;
    }
    for (int64_t k = 0; k < TILE;) {
        const int64_t block_end = ((start + k) / size + 1) * size - start, last = block_end < TILE ? block_end : TILE;
        const bool needed = start + last > keys.begin && start + k < keys.end;
        const int64_t position = needed ? start + k : keys.begin;
        const auto* values = cells.values(keys.table[position / size], keys.head) + position % size * cells.dim;
        const int64_t step = needed ? cells.dim : 0;
        for (const int64_t from = k; k < last; ++k) tile.line[k] = values + (k - from) * step;
    }
}

// A copy in float32: keys [dim, TILE] and values [TILE, padded].
template <class Format>
void unpack(const Cells<Format>& cells, const Keys& wanted, int64_t padded, float* keys, float* values,
            Tile<Unpacked>& tile) {
    using Element = typename Format::Element;
    const int64_t begin = wanted.begin, end = wanted.end, start = begin / TILE * TILE;
    const int64_t dim = cells.dim, size = cells.block_size;
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
        const Element* source = cells.keys(wanted.table[position / size], wanted.head) + (from - position);
        float* target = keys + from - start;
        for (int64_t d = 0; d < dim; ++d) copy(source + d * size, target + d * TILE, to - from);
        source = cells.values(wanted.table[position / size], wanted.head);
        for (int64_t k = from < begin ? begin : from; k < to && k < end; ++k) {
            copy(source + (k - position) * dim, values + (k - start) * padded, dim);
            for (int64_t i = dim; i < padded; ++i) values[(k - start) * padded + i] = 0;
        }
    }
    tile.stride = TILE;
    for (int c = 0; c < TILE_VECTORS; ++c) tile.column[c] = keys + c * LANES;
    for (int k = 0; k < TILE; ++k) tile.line[k] = values + k * padded;
}

// The same of latents: keys are their transpose, and values are what they begin with.
template <class Format>
void unpack(const LatentCells<Format>& cells, const Keys& wanted, int64_t, float* keys, float* values,
            Tile<Unpacked>& tile) {
    using Element = typename Format::Element;
    const int64_t start = wanted.begin / TILE * TILE, size = cells.block_size, dim = cells.dim;
    const int64_t stride = (dim + 15) / 16 * 16;
    for (int64_t first = 0; first < TILE && start + first < wanted.end; first += LANES) {
        const Element* line[LANES];
        for (int i = 0; i < LANES; ++i) {
            const int64_t next = start + first + i, position = next < wanted.end ? next : wanted.end - 1;
            line[i] = cells.line(wanted.table[position / size] * size + position % size);
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            const int64_t count = dim - d < LANES ? dim - d : LANES;
            Vec part[LANES];
            for (int i = 0; i < LANES; ++i) {
                if (count == LANES) {
                    part[i] = Format::read(line[i] + d);
                } else {
                    Element lanes[LANES] = {};
                    std::memcpy(lanes, line[i] + d, sizeof(Element) * count);
                    part[i] = Format::read(lanes);
                }
                store(values + (first + i) * stride + d, part[i]);
            }
            transpose(part);
            for (int64_t i = 0; i < count; ++i) store(keys + (d + i) * TILE + first, part[i]);
        }
    }
    tile.stride = TILE;
    for (int c = 0; c < TILE_VECTORS; ++c) tile.column[c] = keys + c * LANES;
    for (int k = 0; k < TILE; ++k) tile.line[k] = values + k * stride;
}

template <class Format>
void gather_scales(const LatentCells<Format>& cells, const Keys& keys, float* key_scales, float* value_scales) {
    if constexpr (Format::SCALED) {
        std::memset(key_scales, 0, sizeof(float) * TILE);
        for (int64_t k = keys.begin; k < keys.end; ++k)
            key_scales[k % TILE] = cells.scale(keys.table[k / cells.block_size] * cells.block_size + k % cells.block_size);
        std::memcpy(value_scales, key_scales, sizeof(float) * TILE);
    }
}

template <class Format>
void locate(const LatentCells<Format>&, const Keys&, Tile<Format>&) {}  // keys are never read in place

template <class Format>
constexpr bool in_place(const Cells<Format>*) {
    return true;
}
template <class Format>
constexpr bool in_place(const LatentCells<Format>*) {
    return false;
}

// Whether many rows gain by reading the cache in place too: each MAX_ROWS of them convert what they read, where a copy is
// converted once but takes twice the room of the first-level cache. Eight bits take more to convert, and may have scales.
template <class Format>
bool reads_freely() {
    constexpr size_t size = sizeof(typename Format::Element);
    return size == 4 || (size == 2 && LANES >= 8 && converts_beside_fma());
}

// Fetches what `unpack` will read of the tile to come, a few lines at each call: blocks lie anywhere in memory, each too
// short for the processor to see what comes next. Many fetches at once gave nothing (benchmarks/notes/cpu.md).
template <class Format>
class Fetch {
   public:
    // `calls`: how often it will be called.
    Fetch(const Cells<Format>& cells, const Keys& wanted, int64_t calls)
        : cells(cells), wanted(wanted), block(wanted.begin / cells.block_size) {
        const int64_t blocks = (wanted.end - 1) / cells.block_size + 1 - block;
        pairs = (blocks * ((cells.cell_bytes() + LINE - 1) / LINE) + calls - 1) / calls;
        open();
    }
    void operator()() {
        for (int64_t i = 0; i < pairs && block * cells.block_size < wanted.end; ++i) {
            fetch(keys + at);
            fetch(values + at);
            at += LINE;
            if (at >= cells.cell_bytes()) ++block, open();
        }
    }

   private:
    static constexpr int64_t LINE = 64;
    const Cells<Format>& cells;
    const Keys wanted;
    int64_t block, at, pairs;  // pairs: lines of keys, and as many of values, at each call
    const char *keys, *values;

    void open() {
        at = 0;
        if (block * cells.block_size >= wanted.end) return;
        keys = (const char*)cells.keys(wanted.table[block], wanted.head);
        values = (const char*)cells.values(wanted.table[block], wanted.head);
    }
};

template <class Format>
class LatentFetch {
   public:
    LatentFetch(const LatentCells<Format>& cells, const Keys& wanted, int64_t calls)
        : cells(cells), wanted(wanted), position(wanted.begin) {
        lines = (wanted.end - wanted.begin + calls - 1) / calls;
    }
    void operator()() {
        for (int64_t i = 0; i < lines && position < wanted.end; ++i, ++position) {
            const int64_t slot = wanted.table[position / cells.block_size] * cells.block_size + position % cells.block_size;
            for (int64_t at = 0; at < cells.line_bytes; at += 64) fetch((const char*)cells.line(slot) + at);
        }
    }

   private:
    const LatentCells<Format>& cells;
    const Keys wanted;
    int64_t position, lines;  // lines: at each call
};

template <class Format>
Fetch<Format> fetch(const Cells<Format>& cells, const Keys& wanted, int64_t calls) {
    return Fetch<Format>(cells, wanted, calls);
}
template <class Format>
LatentFetch<Format> fetch(const LatentCells<Format>& cells, const Keys& wanted, int64_t calls) {
    return LatentFetch<Format>(cells, wanted, calls);
}

// --------------------------------------------------------------------------------------------------------- units
void gather_queries(const Shape& shape, const Unit& unit, float* q) {
    const int64_t width = shape.group() * shape.dim;
    // Weights are powers of two; a soft cap comes before the change of base.
    const Vec scale = set(shape.soft_cap > 0 ? shape.scale : shape.scale * LOG2_E);
    for (int64_t t = 0; t < unit.num_tokens; ++t) {
        const float* source = shape.q + ((unit.first_token + t) * shape.heads + unit.kv_head * shape.group()) * shape.dim;
        map(width, [&](int64_t i, int n) { put(q + t * width + i, mul(get(source + i, n), scale), n); });
    }
}

// Tiles [first, last) of a unit into one state, or, if `apart`, each tile into its own state, one after the other.
// `after` is the unit that this thread does next, if there is one.
template <class Format, template <class> class CellsOf>
void run_tiles(const Shape& shape, const CellsOf<Format>& cells, const Unit& unit, int64_t first, int64_t last,
               float* memory, bool apart, const Unit* after) {
    if (first == last) return;
    const int64_t padded = shape.padded_dim(), count = unit.num_tokens * shape.group();
    float* q = (float*)scratch(0, sizeof(float) * count * shape.dim);
    const int64_t line = (shape.dim + 15) / 16 * 16;  // no less than `padded`
    float* keys = (float*)scratch(1, sizeof(float) * TILE * (shape.dim + line + 2));
    float *values = keys + TILE * shape.dim, *scales = values + TILE * line;
    gather_queries(shape, unit, q);
    const bool direct = in_place(&cells) && (count <= DIRECT_ROWS || reads_freely<Format>()) && shape.dim == padded &&
                        cells.block_size % LANES == 0;
    Tile<Format> located[2];
    Tile<Unpacked> unpacked;
    if (direct) locate(cells, Keys(shape, unit, first), located[first % 2]);
    for (int64_t index = first; index < last; ++index) {
        const Keys needed(shape, unit, index);
        gather_scales(cells, needed, scales, scales + TILE);
        const auto attend = [&](auto& tile, const auto& next, auto meanwhile) {
            if (Format::SCALED) tile.key_scales = scales, tile.value_scales = scales + TILE;
            const int64_t start = index * TILE, position = first_position(shape, unit);
            const int64_t length = shape.causal ? 0 : shape.attended[unit.row];
            const TileWork work{q,      tile,          next,         start,    shape.dim,
                                padded, shape.group(), shape.window, position, length, shape.soft_cap, shape.split};
            attend_tile(work, count, State::at(memory, count, padded), meanwhile);
        };
        if (direct) {
            Tile<Format>&tile = located[index % 2], &next = located[(index + 1) % 2];
            const bool more = index + 1 < last;
            if (more || after)
                locate(cells, Keys(shape, more ? unit : *after, more ? index + 1 : after->first_tile), next);
            attend(tile, more || after ? next : tile, [] {});
        } else {
            unpack(cells, needed, padded, keys, values, unpacked);
            // At the end, with nothing to come, this tile again, which is there already.
            const bool more = index + 1 < last;
            const Unit& owner = more || !after ? unit : *after;
            const Keys coming(shape, owner, more ? index + 1 : after ? after->first_tile : index);
            attend(unpacked, unpacked, fetch(cells, coming, 2 * ((count + MAX_ROWS - 1) / MAX_ROWS)));
        }
        if (apart) memory += State::size(count, padded);
    }
}

void write_out(const Shape& shape, const Unit& unit, State state) {
    const Vec factor = set(shape.value_scale);
    const int64_t padded = shape.padded_dim(), group = shape.group();
    for (int64_t i = 0; i < unit.num_tokens * group; ++i) {
        const int64_t token = unit.first_token + i / group, head = unit.kv_head * group + i % group;
        if (shape.split.ranks > 1) {
            float* part = shape.out + (token * shape.heads + head) * (shape.value_dim + 2);
            const float* sums = state.sums + i * padded;
            map(shape.value_dim, [&](int64_t d, int n) { put(part + d, mul(get(sums + d, n), factor), n); });
            part[shape.value_dim] = state.highest[i];
            part[shape.value_dim + 1] = state.total[i];
            continue;
        }
        float* out = shape.out + (token * shape.heads + head) * shape.value_dim;
        // A score beside those of the keys: it takes a share of the weight and adds nothing.
        const float sink = shape.sinks ? std::exp2(shape.sinks[head] * LOG2_E - state.highest[i]) : 0.0f;
        const float all = state.total[i] + sink;
        const Vec total = set(all == 0 ? 1.0f : all);  // of a query that sees no key, the result is 0
        const float* sums = state.sums + i * padded;
        map(shape.value_dim, [&](int64_t d, int n) { put(out + d, mul(div(get(sums + d, n), total), factor), n); });
    }
}

template <class CellsType>
void run_unit(const Shape& shape, const CellsType& cells, const Unit& unit, const Unit* after) {
    const int64_t padded = shape.padded_dim(), count = unit.num_tokens * shape.group();
    float* memory = (float*)scratch(2, sizeof(float) * State::size(count, padded));
    const State state = State::at(memory, count, padded);
    state.clear(count, padded);
    run_tiles(shape, cells, unit, unit.first_tile, unit.first_tile + unit.num_tiles, memory, false, after);
    write_out(shape, unit, state);
}

// Merge the states of a unit's tiles, in order, into the first one.
void merge_tiles(const Shape& shape, const Unit& unit, float* memory) {
    const int64_t padded = shape.padded_dim(), count = unit.num_tokens * shape.group();
    const State merged = State::at(memory, count, padded);
    if (unit.num_tiles == 0) merged.clear(count, padded);
    float *old_one = (float*)scratch(1, sizeof(float) * 2 * count), *new_one = old_one + count;
    for (int64_t tile = 1; tile < unit.num_tiles; ++tile) {
        const State part = State::at(memory + tile * State::size(count, padded), count, padded);
        join(count, merged.highest, merged.total, part.highest, part.total, {old_one, new_one});
        for (int64_t i = 0; i < count; ++i) {
            const Vec before = set(old_one[i]), now = set(new_one[i]);
            for (int64_t d = 0; d < padded; d += LANES) {
                float* sum = merged.sums + i * padded + d;
                store(sum, fma(load(sum), before, mul(load(part.sums + i * padded + d), now)));
            }
        }
    }
    write_out(shape, unit, merged);
}

// Units of a row of `tokens` for each KV head. Of a row that is most of the step, as many as all threads get the same
// number of, if these are not too small.
int64_t count_units(const Shape& shape, int64_t tokens, int64_t tokens_per_unit) {
    const int64_t least = (tokens + tokens_per_unit - 1) / tokens_per_unit;
    if (2 * tokens < shape.starts[shape.num_rows] - shape.starts[0]) return least;
    int64_t even = least;
    while (even * shape.kv_heads % num_threads()) ++even;
    return even <= tokens && even * EVEN_ROWS <= tokens * shape.group() ? even : least;
}

int64_t make_units(const Shape& shape, Unit* units) {
    int64_t query_rows = QUERY_ROWS;
    const int64_t all_rows = (shape.starts[shape.num_rows] - shape.starts[0]) * shape.heads;
    while (query_rows > 48 && all_rows / query_rows < 8 * num_threads()) query_rows /= 2;
    const int64_t tokens_per_unit = query_rows / shape.group() > 0 ? query_rows / shape.group() : 1;
    int64_t count = 0;
    for (int64_t row = 0; row < shape.num_rows; ++row) {
        // The last tokens first: they have the most keys, and large pieces of work should not come last.
        const int64_t start = shape.starts[row], tokens = shape.starts[row + 1] - start;
        const int64_t parts = count_units(shape, tokens, tokens_per_unit);
        for (int64_t part = parts - 1; part >= 0; --part) {
            const int64_t first = start + tokens * part / parts, end = start + tokens * (part + 1) / parts;
            Unit unit{(int32_t)row, (int32_t)first, (int32_t)(end - first), 0, 0, 0};
            const int64_t position = first_position(shape, unit);
            unit.first_tile = (int32_t)(first_seen(shape, position) / TILE);
            const int64_t end_key = end_seen(shape, row, position + unit.num_tokens - 1);
            unit.num_tiles = (int32_t)((end_key + TILE - 1) / TILE - unit.first_tile);
            // Of what it sees, nothing is kept here, or it sees nothing.
            if (end_key <= first_seen(shape, position)) unit.num_tiles = 0;
            for (int64_t head = 0; head < shape.kv_heads; ++head) {
                unit.kv_head = (int32_t)head;
                units[count++] = unit;
            }
        }
    }
    return count;
}

// Few units with many keys: threads share the tiles, then the tiles of each unit are merged in order.
template <class CellsType>
void run_split(const Shape& shape, const CellsType& cells, const Unit* units, int64_t count) {
    const int64_t padded = shape.padded_dim();
    int64_t* offsets = (int64_t*)scratch(4, sizeof(int64_t) * 2 * (count + 1));
    int64_t* first_item = offsets + count + 1;
    offsets[0] = first_item[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t size = State::size(units[i].num_tokens * shape.group(), padded);
        offsets[i + 1] = offsets[i] + size * (units[i].num_tiles > 0 ? units[i].num_tiles : 1);
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
                      units[i].first_tile + last - first_item[i], states, true, nullptr);
            begin = last;
        }
    });
    parallel(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) merge_tiles(shape, units[i], memory + offsets[i]);
    });
}

template <class MakeCells>
void run(const Shape& shape, int kv_type, MakeCells make_cells) {
    const int32_t* starts = shape.starts;
    Unit* units = (Unit*)scratch(3, sizeof(Unit) * (starts[shape.num_rows] - starts[0]) * shape.kv_heads);
    const int64_t count = make_units(shape, units);
    int64_t most_rows = 0, tiles = 0;
    for (int64_t i = 0; i < count; ++i) {
        most_rows = units[i].num_tokens * shape.group() > most_rows ? units[i].num_tokens * shape.group() : most_rows;
        tiles += units[i].num_tiles;
    }
    const bool split = count < 8 * num_threads() && tiles >= 2 * count && most_rows <= SPLIT_ROWS && num_threads() > 1;
    with_format(kv_type, [&](auto format) {
        const auto cells = make_cells(format);
        if (split) return run_split(shape, cells, units, count);
        // Very little work is done by one thread: waking another takes longer.
        const int64_t grain = 1 + 8192 / (tiles * TILE * shape.dim / count * (most_rows + 2) / 64 + 1);
        parallel(count, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                run_unit(shape, cells, units[i], i + 1 < end && units[i + 1].num_tiles ? units + i + 1 : nullptr);
        });
    });
}

}  // namespace

void attention(const float* q, const void* cache, const int32_t* tables, const int64_t* rows, const int32_t* contexts,
               const int32_t* starts, float* out, int64_t num_rows, int64_t table_stride, int64_t value_offset,
               int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t window, int causal, int kv_type,
               float scale, float soft_cap, const float* sinks, int64_t ranks, int64_t rank, float value_scale,
               const int32_t* attended) {
    if (num_rows == 0) return;
    const Shape shape{q,        tables, rows, contexts, starts,      out,   num_rows, table_stride, heads,
                      kv_heads, dim,    dim,  window,   causal != 0, scale, soft_cap, sinks,
                      {ranks, rank, block_size}, value_scale, attended};
    run(shape, kv_type, [&](auto format) {
        return Cells<decltype(format)>{(char*)const_cast<void*>(cache), value_offset, kv_heads, dim, block_size};
    });
}

void latent_attention(const float* q, const void* cache, const int32_t* tables, const int64_t* rows,
                      const int32_t* contexts, const int32_t* starts, float* out, int64_t num_rows, int64_t table_stride,
                      int64_t line_bytes, int64_t heads, int64_t dim, int64_t value_dim, int64_t block_size, int kv_type,
                      float scale, int64_t ranks, int64_t rank) {
    if (num_rows == 0) return;
    // All heads read the same keys. They are in groups so large that units of work can be shared among threads.
    int64_t group = heads < SPLIT_ROWS ? heads : SPLIT_ROWS;
    while (heads % group) --group;
    const Shape shape{q,            tables, rows,          contexts, starts,    out, num_rows,
                      table_stride, heads,  heads / group, dim,      value_dim, 0,   true,     scale, 0.0f, nullptr,
                      {ranks, rank, block_size}};
    run(shape, kv_type, [&](auto format) {
        return LatentCells<decltype(format)>{(char*)const_cast<void*>(cache), dim, block_size, line_bytes};
    });
}

void own_slots(const int64_t* slots, int64_t* out, int64_t count, int64_t ranks, int64_t rank, int64_t block_size) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t block = slots[i] / (ranks * block_size), token = slots[i] % (ranks * block_size);
        out[i] = token / block_size == rank ? block * block_size + token % block_size : -1;
    }
}

void merge_contexts(const float* parts, const float* sinks, float* out, int64_t tokens, int64_t ranks, int64_t heads,
                    int64_t first_head, int64_t count, int64_t dim) {
    const int64_t line = dim + 2;
    parallel(tokens * count, 1 + 8192 / (ranks * line), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t token = i / count, head = i % count;
            float highest = NOTHING, total = 0, old_one, new_one, *sums = out + i * dim;
            std::memset(sums, 0, sizeof(float) * dim);
            for (int64_t r = 0; r < ranks; ++r) {
                const float* part = parts + ((token * ranks + r) * heads + first_head + head) * line;
                join(1, &highest, &total, part + dim, part + dim + 1, {&old_one, &new_one});
                const Vec before = set(old_one), now = set(new_one);
                map(dim, [&](int64_t d, int n) {
                    put(sums + d, fma(get(sums + d, n), before, mul(get(part + d, n), now)), n);
                });
            }
            const Vec all = set(total + (sinks ? std::exp2(sinks[head] * LOG2_E - highest) : 0.0f));
            map(dim, [&](int64_t d, int n) { put(sums + d, div(get(sums + d, n), all), n); });
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
