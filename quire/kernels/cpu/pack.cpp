// Packs weights into panels, from GGUF blocks as they are and from floats (quantizing them if asked to), and reads
// rows back. GGUF weights keep their value: unpacked rows equal the dequantized blocks to the last bit.
#include "panels.h"

namespace quire {
namespace QUIRE_NS {
namespace {

// What one output has in one BLOCK along k.
struct Piece {
    uint8_t codes[BLOCK];  // integers, modulo 256
    uint16_t half[2];      // scale and minimum where the format keeps f16, or the factors of integers
    int8_t integer[2];     // scale and minimum, or two scales, where it keeps integers
};

inline uint16_t read16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

inline void nibbles(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = p[i] & 15;
        codes[16 + i] = p[i] >> 4;
    }
}

inline void fifth_bits(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < BLOCK; ++i) codes[i] |= (uint8_t)((p[i / 8] >> (i % 8) & 1) << 4);
}

// ---- GGUF blocks. Each reader gets the row and the index of the BLOCK in it.
void read_q4_0(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index * 18;
    piece.half[0] = read16(block);
    nibbles(block + 2, piece.codes);
}

void read_q4_1(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index * 20;
    piece.half[0] = read16(block);
    piece.half[1] = read16(block + 2);
    nibbles(block + 4, piece.codes);
}

void read_q5_0(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index * 22;
    piece.half[0] = read16(block);
    nibbles(block + 6, piece.codes);
    fifth_bits(block + 2, piece.codes);
    for (auto& code : piece.codes) code = (uint8_t)(code - 16);
}

void read_q5_1(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index * 24;
    piece.half[0] = read16(block);
    piece.half[1] = read16(block + 2);
    nibbles(block + 8, piece.codes);
    fifth_bits(block + 4, piece.codes);
}

void read_q8_0(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index * 34;
    piece.half[0] = read16(block);
    std::memcpy(piece.codes, block + 2, BLOCK);
}

// Scale and minimum of part `s` of a Q4_K or Q5_K block: two halves, then 12 bytes with 16 six-bit numbers. Minima are
// subtracted.
void six_bit_scales(const uint8_t* block, int s, Piece& piece) {
    const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
    const int step = s < 4 ? first[s] & 63 : (third[s - 4] & 15) | first[s - 4] >> 6 << 4;
    const int minimum = s < 4 ? second[s] & 63 : third[s - 4] >> 4 | second[s - 4] >> 6 << 4;
    piece.integer[0] = (int8_t)step, piece.integer[1] = (int8_t)minimum;
    piece.half[0] = read16(block), piece.half[1] = (uint16_t)(read16(block + 2) ^ 0x8000);
}

void nibbles_of_part(const uint8_t* p, int s, uint8_t* codes) {
    for (int i = 0; i < BLOCK; ++i) codes[i] = p[s / 2 * 32 + i] >> (s % 2 * 4) & 15;
}

void read_q4_k(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index / 8 * 144;
    six_bit_scales(block, (int)(index % 8), piece);
    nibbles_of_part(block + 16, (int)(index % 8), piece.codes);
}

void read_q5_k(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index / 8 * 176;
    const int s = (int)(index % 8);
    six_bit_scales(block, s, piece);
    nibbles_of_part(block + 48, s, piece.codes);
    for (int i = 0; i < BLOCK; ++i) piece.codes[i] |= (uint8_t)((block[16 + i] >> s & 1) << 4);
}

void read_q6_k(const uint8_t* row, int64_t index, Piece& piece) {
    const uint8_t* block = row + index / 8 * 210;
    const int s = (int)(index % 8), half = s / 4, quarter = s % 4;
    const uint8_t *low = block + half * 64 + quarter % 2 * 32, *high = block + 128 + half * 32;
    for (int i = 0; i < BLOCK; ++i)
        piece.codes[i] = (uint8_t)(((low[i] >> (quarter / 2 * 4) & 15) | (high[i] >> (quarter * 2) & 3) << 4) - 32);
    piece.half[0] = read16(block + 208);
    for (int i = 0; i < 2; ++i) piece.integer[i] = (int8_t)block[192 + 2 * s + i];
}

struct BlockType {
    void (*read)(const uint8_t*, int64_t, Piece&);
    Format format;
};

// The order is that of matrix.py.
constexpr BlockType BLOCK_TYPES[] = {
    {read_q4_0, CODE4},     {read_q4_1, CODE4_MIN},     {read_q5_0, CODE8},         {read_q5_1, CODE8_MIN},
    {read_q8_0, CODE8},     {read_q4_k, CODE4_MIN_K}, {read_q5_k, CODE8_MIN_K}, {read_q6_k, CODE8_K},
};

// ---- writing
uint32_t eight_nibbles(const uint8_t* codes) {
    uint64_t v;
    std::memcpy(&v, codes, 8);
    v &= 0x0f0f0f0f0f0f0f0f;
    v = (v | v >> 4) & 0x00ff00ff00ff00ff;
    v = (v | v >> 8) & 0x0000ffff0000ffff;
    return (uint32_t)(v | v >> 16);
}

void write_block(const Layout& layout, const Piece* pieces, uint8_t* panel, int64_t inner, int64_t index) {
    uint8_t *scales = panel + layout.scales_at(index * BLOCK), *factors = panel + layout.factors_at(index * BLOCK);
    const int num_scales = layout.has_min || layout.group < BLOCK ? 2 : 1;
    for (int lane = 0; lane < PANEL; ++lane)
        for (int i = 0; i < num_scales; ++i) {
            if (layout.scale_bytes == 1)
                std::memcpy(scales + i * PANEL + lane, &pieces[lane].integer[i], 1);
            else
                std::memcpy(scales + (i * PANEL + lane) * 2, &pieces[lane].half[i], 2);
        }
    for (int lane = 0; lane < PANEL; ++lane)
        for (int i = 0; i < layout.factor_bytes() / (2 * PANEL); ++i)
            std::memcpy(factors + (i * PANEL + lane) * 2, &pieces[lane].half[i], 2);
    uint8_t* codes = panel + layout.codes_at(inner) + index * BLOCK * layout.bits * PANEL / 8;
    if (layout.bits == 4) {
        for (int lane = 0; lane < PANEL; ++lane)
            for (int line = 0; line < 4; ++line) {
                const uint32_t word = eight_nibbles(pieces[lane].codes + line * 8);
                std::memcpy(codes + (line * PANEL + lane) * 4, &word, 4);
            }
    } else {
        for (int k = 0; k < BLOCK; ++k)
            for (int lane = 0; lane < PANEL; ++lane) codes[k * PANEL + lane] = pieces[lane].codes[k];
    }
}

// read(row, block index, piece) for each row, and panels from that. Rows past the last are zero.
template <class F>
void pack_panels(Format format, uint8_t* panels, int64_t rows, int64_t inner, const F& read) {
    const Layout& layout = LAYOUTS[format];
    const int64_t panel_bytes = layout.panel_bytes(inner), blocks = layout.padded(inner) / BLOCK;
    parallel((rows + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            uint8_t* panel = panels + p * panel_bytes;
            std::memset(panel, 0, layout.codes_at(inner));
            for (int64_t b = 0; b < blocks; ++b) {
                Piece pieces[PANEL] = {};
                for (int lane = 0; lane < PANEL && p * PANEL + lane < rows; ++lane)
                    read(p * PANEL + lane, b, pieces[lane]);
                write_block(layout, pieces, panel, inner, b);
            }
        }
    });
}

// ---- floats
inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// The nearest f16, ties to even.
uint16_t to_half(float value) {
    const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 65536 or more
    if (magnitude < 0x38800000) {                                   // below 2^-14: a multiple of 2^-24
        return (uint16_t)(sign | (uint32_t)std::nearbyint(from_bits(magnitude) * 16777216.0f));
    }
    return (uint16_t)(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10)));
}

uint16_t to_bfloat(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The least f16 that is not below `value`, and the greatest that is not above it.
uint16_t half_above(float value) {
    const uint16_t half = to_half(value);
    if (!(half_to_float(half) < value)) return half;
    return half == 0x8000 ? 1 : (uint16_t)(half & 0x8000 ? half - 1 : half + 1);
}

uint16_t half_below(float value) { return (uint16_t)(half_above(-value) ^ 0x8000); }

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// [-127, 127] * scale. False if a value is too large for a f16 scale, or no number.
bool quantize8(const float* values, int count, Piece& piece) {
    float largest = 0;
    bool all_numbers = true;
    for (int i = 0; i < count; ++i) {
        const float magnitude = std::fabs(values[i]);
        largest = magnitude > largest ? magnitude : largest;
        all_numbers = all_numbers && magnitude == magnitude;
    }
    uint16_t half = half_above(largest / 127.0f);
    if (half_to_float(half) * 127.0f < largest) ++half;  // the quotient was rounded down
    if (!is_finite(half) || !all_numbers) return false;
    const float scale = half_to_float(half);
    piece.half[0] = half;
    for (int i = 0; i < count; ++i)
        piece.codes[i] = (uint8_t)(int8_t)(scale > 0 ? std::nearbyint(values[i] / scale) : 0.0f);
    return true;
}

// minimum + [0, 15] * scale.
bool quantize4(const float* values, int count, Piece& piece) {
    float low = values[0], high = values[0];
    bool all_numbers = true;
    for (int i = 0; i < count; ++i) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
        all_numbers = all_numbers && values[i] == values[i];
    }
    piece.half[1] = half_below(low);
    if (!is_finite(piece.half[1]) || !all_numbers) return false;
    const float minimum = half_to_float(piece.half[1]);
    uint16_t half = half_above((high - minimum) / 15.0f);
    if (minimum + half_to_float(half) * 15.0f < high) ++half;
    if (!is_finite(half)) return false;
    const float scale = half_to_float(half);
    piece.half[0] = half;
    for (int i = 0; i < count; ++i) {
        const float code = scale > 0 ? std::nearbyint((values[i] - minimum) / scale) : 0.0f;
        piece.codes[i] = (uint8_t)(code > 15.0f ? 15.0f : code);
    }
    return true;
}

enum Source : int64_t { FROM_FLOAT32 = 0, FROM_BFLOAT16 = 1, FROM_FLOAT16 = 2 };

inline float read_float(const uint8_t* row, int64_t source, int64_t k) {
    if (source == FROM_FLOAT32) {
        float value;
        std::memcpy(&value, row + k * 4, 4);
        return value;
    }
    const uint16_t bits = read16(row + k * 2);
    return source == FROM_BFLOAT16 ? from_bits((uint32_t)bits << 16) : half_to_float(bits);
}

// Elements [from, from + count) of a row.
void read_floats(const uint8_t* row, int64_t source, int64_t from, int count, float* values) {
    if (source == FROM_FLOAT32)
        std::memcpy(values, row + from * 4, count * sizeof(float));
    else if (source == FROM_BFLOAT16)
        for (int i = 0; i < count; ++i) values[i] = read_float(row, FROM_BFLOAT16, from + i);
    else
        for (int i = 0; i < count; ++i) values[i] = read_float(row, FROM_FLOAT16, from + i);
}

// One BLOCK of all lanes, which starts at `codes`.
void write_floats(Format format, const float values[PANEL][BLOCK], uint8_t* codes) {
    for (int k = 0; k < BLOCK; ++k)
        for (int lane = 0; lane < PANEL; ++lane) {
            const float value = values[lane][k];
            if (format == FLOAT32) {
                std::memcpy(codes + (k * PANEL + lane) * 4, &value, 4);
            } else {
                const bool brain = format == BFLOAT16;
                const uint16_t bits = brain ? to_bfloat(value) : to_half(value);
                const int at = brain ? (k / 2 * PANEL + lane) * 2 + k % 2 : k * PANEL + lane;
                std::memcpy(codes + at * 2, &bits, 2);
            }
        }
}

void pack_plain(const uint8_t* weights, int64_t row_bytes, int64_t source, Format format, uint8_t* panels,
                int64_t rows, int64_t inner) {
    const Layout& layout = LAYOUTS[format];
    const int64_t panel_bytes = layout.panel_bytes(inner);
    parallel((rows + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p)
            for (int64_t k = 0; k < inner; k += BLOCK) {
                float values[PANEL][BLOCK] = {};
                const int count = inner - k < BLOCK ? (int)(inner - k) : BLOCK;
                for (int lane = 0; lane < PANEL && p * PANEL + lane < rows; ++lane)
                    read_floats(weights + (p * PANEL + lane) * row_bytes, source, k, count, values[lane]);
                write_floats(format, values, panels + p * panel_bytes + k * layout.bits * PANEL / 8);
            }
    });
}

// ---- reading back
// Element k of lane `lane`.
inline float unpack(Format format, const uint8_t* panel, int64_t inner, int64_t lane, int64_t k) {
    const Layout& layout = LAYOUTS[format];
    const uint8_t* codes = panel + layout.codes_at(inner);
    if (format == FLOAT32) return read_float(codes, FROM_FLOAT32, k * PANEL + lane);
    if (format == FLOAT16) return read_float(codes, FROM_FLOAT16, k * PANEL + lane);
    if (format == BFLOAT16) return read_float(codes, FROM_BFLOAT16, (k / 2 * PANEL + lane) * 2 + k % 2);
    float code;
    if (layout.bits == 4) {
        const int nibble = codes[(k / 8 * PANEL + lane) * 4 + k % 8 / 2] >> (k % 2 * 4) & 15;
        code = layout.table ? TABLES[layout.table][nibble] : (float)(nibble - layout.zero);
    } else if (format == E4M3 || format == E5M2) {
        const uint8_t byte = codes[k * PANEL + lane];
        code = half_to_float(format == E5M2 ? half_of_e5m2(byte) : half_of_e4m3(byte));
    } else {
        code = (float)(int8_t)codes[k * PANEL + lane];
    }
    const uint8_t* scales = panel + layout.scales_at(k);
    if (layout.scale_bytes == 1) {
        const uint8_t* factors = panel + layout.factors_at(k);
        const auto number = [&](int64_t at) { return (float)(int8_t)scales[at] * read_float(factors, FROM_FLOAT16, at); };
        return layout.has_min ? std::fma(code, number(lane), number(PANEL + lane)) : code * number(lane);
    }
    const int64_t source = layout.scale_bytes == 2 ? FROM_FLOAT16 : FROM_FLOAT32;
    const float scale = read_float(scales, source, lane);
    return layout.has_min ? std::fma(code, scale, read_float(scales, source, PANEL + lane)) : code * scale;
}

}  // namespace

void panel_bytes(int64_t format, int64_t inner, int64_t* bytes) { *bytes = LAYOUTS[format].panel_bytes(inner); }

void pack_blocks(const void* blocks, int64_t row_bytes, int64_t type, uint8_t* panels, int64_t rows, int64_t inner) {
    const BlockType& kind = BLOCK_TYPES[type];
    pack_panels(kind.format, panels, rows, inner, [&](int64_t row, int64_t index, Piece& piece) {
        kind.read((const uint8_t*)blocks + row * row_bytes, index, piece);
    });
}

void pack_floats(const void* weights, int64_t row_bytes, int64_t source, int64_t format, uint8_t* panels, int64_t rows,
                 int64_t inner, int64_t* refused) {
    *refused = -1;
    if (LAYOUTS[format].scale_bytes == 0)
        return pack_plain((const uint8_t*)weights, row_bytes, source, (Format)format, panels, rows, inner);
    int64_t bad_row = -1;
    pack_panels((Format)format, panels, rows, inner, [&](int64_t row, int64_t index, Piece& piece) {
        float values[BLOCK] = {};
        const int64_t left = inner - index * BLOCK;
        const int count = left < BLOCK ? (int)left : BLOCK;
        read_floats((const uint8_t*)weights + row * row_bytes, source, index * BLOCK, count, values);
        const bool fits = format == CODE8 ? quantize8(values, count, piece) : quantize4(values, count, piece);
        if (!fits) __atomic_store_n(&bad_row, row, __ATOMIC_RELAXED);
    });
    *refused = bad_row;
}

void unpack_rows(const uint8_t* panels, int64_t format, int64_t inner, const int64_t* ids, int64_t count, float* out) {
    const int64_t panel_bytes = LAYOUTS[format].panel_bytes(inner);
    parallel(count, 1 + 4096 / inner, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = ids[i];
            const uint8_t* panel = panels + row / PANEL * panel_bytes;
            for (int64_t k = 0; k < inner; ++k)
                out[i * inner + k] = unpack((Format)format, panel, inner, row % PANEL, k);
        }
    });
}

}  // namespace QUIRE_NS
}  // namespace quire
