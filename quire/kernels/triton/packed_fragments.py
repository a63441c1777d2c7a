"""Matmuls of up to 8 tokens with packed weights: matrix instructions whose operands never leave registers.

A warp multiplies 16 lines by 8 tokens. Of each 128 columns a thread reads 16 bytes of two lines,
unpacks them with a few bit operations and gives them to the matrix unit as they are: which thread has which columns
is all the same to an inner sum, as long as the activations are read likewise. There is no shared memory in the loop
and nothing to wait for but what is read. The warps of a program have different columns of the same lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.packed import PackedWeight
from quire.kernels.triton.grouped_matmul import activated, empty_slots, weighted
from quire.kernels.triton.launch import allow_dependents, launch_options, wait_for_predecessor
from quire.kernels.triton.packed_matmul import _kind, _parts, has_packed_arithmetic
from quire.kernels.triton.tile_matmul import lines_of

MAX_TOKENS = 8
_LINES = 16
_ALIGNMENT = 16  # bytes
_COLUMNS = 128  # of a piece of 4-bit weights


def _assembly(kind: str) -> str:
    """A piece's matmul: $0-3 of 4 words of two lines each ($4-7, $8-11) and x (from $12 on).

    Behind x (16 words) 4-bit weights have zeros or powers ($28-31). Two chains of matrix instructions, so that they
    wait less for one another.
    """
    lines = [
        "{",
        ".reg .b32 a<4>, b<2>, part, sign, power;",
        ".reg .f32 d<4>;",
        *(f"mov.b32 ${index}, 0; mov.f32 d{index}, 0f00000000;" for index in range(4)),
        *_slices(kind),
        *(f"add.f32 ${index}, ${index}, d{index};" for index in range(4)),
        "}",
    ]
    return "\n".join(lines)


def _mma(chain: int, first: str, second: str) -> str:
    sums = ", ".join(f"d{index}" if chain else f"${index}" for index in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{a0, a1, a2, a3}}, "
        f"{{{first}, {second}}}, {{{sums}}};"
    )


def _slices(kind: str) -> list[str]:
    """Four slices of columns of two words at a time."""
    lines = []
    for piece in range(4):
        for half in range(2):
            for operand in range(4):
                line, word = operand % 2, 2 * half + operand // 2
                lines += unpacked(kind, f"a{operand}", 4 + 4 * line + word, piece, 28 + 2 * line)
            x = 12 + 4 * piece + 2 * half
            lines.append(_mma(half, f"${x}", f"${x + 1}"))
    return lines


def unpacked(kind: str, to: str, word: int, piece: int, number: int) -> list[str]:
    """Two columns of one of the four slices of a word; `number` is the operand that is its zeros or first power."""
    if kind == "int4":
        source = f"${word}" if piece == 0 else "part"
        return [
            *([] if piece == 0 else [f"shr.u32 part, ${word}, {4 * piece};"]),
            f"lop3.b32 part, {source}, 0x000F000F, 0x43004300, 0xEA;",
            f"sub.bf16x2 {to}, part, ${number};",
        ]
    moved = 6 - 4 * piece
    return [
        f"shl.b32 sign, ${word}, {12 - 4 * piece};",
        "and.b32 sign, sign, 0x80008000;",
        f"shl.b32 part, ${word}, {moved};" if moved > 0 else f"shr.u32 part, ${word}, {-moved};",
        "lop3.b32 part, part, 0x01C001C0, sign, 0xEA;",
        f"mul.bf16x2 {to}, part, ${number + piece // 2};",
    ]


_INT4: tl.constexpr = tl.constexpr(_assembly("int4"))
_E2M1: tl.constexpr = tl.constexpr(_assembly("e2m1"))
_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 28))


@triton.jit
def plain(bits):
    """The lower bfloat16 of words as float32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def half_values(words, SHIFT: tl.constexpr, zeros, KIND: tl.constexpr):
    """The codes at some bits of words, as float32."""
    code = (words >> SHIFT) & 15
    if KIND == "int4":
        return plain(code + 0x4300) - zeros
    return plain(((code & 8) << 12) | ((code & 7) << 6)) * zeros


@triton.jit
def _pair_sums(words, x, zeros, SLICE: tl.constexpr, KIND: tl.constexpr, WARPS: tl.constexpr):
    """What one slice of words of 8 lines gives for each of 8 tokens: [WARPS, 8, 8]."""
    first = (x << 16).to(tl.float32, bitcast=True)
    second = (x & -65536).to(tl.float32, bitcast=True)
    a, b = half_values(words, 4 * SLICE, zeros, KIND), half_values(words, 16 + 4 * SLICE, zeros, KIND)
    sums = tl.reshape(a, [WARPS, 8, 1, 16]) * tl.reshape(first, [WARPS, 1, 8, 16])
    sums += tl.reshape(b, [WARPS, 8, 1, 16]) * tl.reshape(second, [WARPS, 1, 8, 16])
    return tl.sum(sums, axis=3)


@triton.jit
def _piece_matmul(low, high, x0, x1, x2, x3, zeros, KIND: tl.constexpr, ASM: tl.constexpr, WARPS: tl.constexpr):
    """Sums of one piece [32 * WARPS, 4]: two lines of a thread, each for two tokens, as matrix units have them."""
    if ASM:
        if KIND == "int4":
            return tl.inline_asm_elementwise(
                _INT4, _OPERANDS, [low, high, x0, x1, x2, x3, zeros], dtype=tl.float32, is_pure=True, pack=4
            )
        return tl.inline_asm_elementwise(
            _E2M1, _OPERANDS, [low, high, x0, x1, x2, x3, zeros], dtype=tl.float32, is_pure=True, pack=4
        )
    # Of integers twice the same, else the powers of both halves of a chunk.
    by_half, second = tl.split(tl.reshape(plain(zeros), [32 * WARPS, 2, 2]))
    low_first, high_first = tl.split(by_half)
    low_second, high_second = tl.split(second)
    one = tl.zeros([32 * WARPS, 4], tl.float32)
    a, b = one + low_first[:, None], one + high_first[:, None]
    lower = _pair_sums(low, x0, a, 0, KIND, WARPS) + _pair_sums(low, x1, a, 1, KIND, WARPS)
    upper = _pair_sums(high, x0, b, 0, KIND, WARPS) + _pair_sums(high, x1, b, 1, KIND, WARPS)
    a, b = one + low_second[:, None], one + high_second[:, None]
    lower += _pair_sums(low, x2, a, 2, KIND, WARPS) + _pair_sums(low, x3, a, 3, KIND, WARPS)
    upper += _pair_sums(high, x2, b, 2, KIND, WARPS) + _pair_sums(high, x3, b, 3, KIND, WARPS)
    return _in_fragments(lower, upper, WARPS)


@triton.jit
def _in_fragments(lower, upper, WARPS: tl.constexpr):
    """Sums of 8 lines and 8 others [WARPS, 8, 8] as matrix units give them to threads: [32 * WARPS, 4]."""
    both = tl.permute(tl.reshape(tl.join(lower, upper), [WARPS, 32, 2, 2]), (0, 1, 3, 2))
    return tl.reshape(both, [32 * WARPS, 4])


@triton.jit
def scale_at(scale_ptr, at, ASM: tl.constexpr):
    """Scales as float32, two addresses of a thread being the same."""
    if not ASM:
        return tl.load(scale_ptr + at).to(tl.float32)
    # Loads by assembly: their results lie where they are used, and not where the compiler finds loads fast.
    kind: tl.constexpr = scale_ptr.dtype.element_ty
    if kind == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 h; ld.global.b16 h, [$2]; cvt.f32.f16 $0, h; mov.b32 $1, $0; }",
            "=&r,=&r,l,l", [scale_ptr + at], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [$2]; mov.b32 $0, {z, h}; mov.b32 $1, $0; }",
            "=&r,=&r,l,l", [scale_ptr + at], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$2]; mov.b32 $1, $0;",
        "=&r,=&r,l,l", [scale_ptr + at], dtype=tl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def byte_at(ptr, at, ASM: tl.constexpr):
    """Bytes as int32."""
    if not ASM:
        return tl.load(ptr + at).to(tl.int32) & 255
    return tl.inline_asm_elementwise(
        "ld.global.u8 $0, [$1];", "=r,l", [ptr + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _numbers_at(scale_ptr, zero_ptr, groups, piece, chunk, i, KIND: tl.constexpr, GROUP: tl.constexpr,
                ASM: tl.constexpr):  # fmt: skip
    """Scales of a piece, and what is taken from or multiplied into its weights: twice the same bfloat16."""
    if KIND == "e2m1":
        zero = powers_at(scale_ptr, groups + (4 * piece + 2 * chunk)[:, None] + i % 2, ASM)
        scale = zero.to(tl.float32)
    else:
        at = groups + (piece * 128 // GROUP)[:, None]
        scale = scale_at(scale_ptr, at, ASM)
        if zero_ptr is None:
            zero = tl.full(scale.shape, 0x43084308, tl.int32)
        else:
            zero = byte_at(zero_ptr, at, ASM) * 0x00010001 + 0x43004300
    return scale, zero


@triton.jit
def powers_at(scale_ptr, at, ASM: tl.constexpr):
    """2 ** 63 times the powers of two whose exponents stand side by side, twice the same bfloat16."""
    if not ASM:
        return (byte_at(scale_ptr, at, ASM) + 63) * 0x00800080
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 both;
        .reg .b32 word;
        ld.global.b16 both, [$2];
        mov.b32 word, {both, both};
        and.b32 $1, word, 255;
        mad.lo.u32 $0, $1, 0x00800080, 0x1F801F80;
        bfe.u32 $1, word, 8, 8;
        mad.lo.u32 $1, $1, 0x00800080, 0x1F801F80;
        }
        """,
        "=&r,=&r,l,l",
        [scale_ptr + at],
        dtype=tl.int32,
        is_pure=False,
        pack=2,
    )


def _wide_assembly(kind: str, number: int) -> str:
    """Reads the scales (of a 16-bit type) or the zeros of `number` pieces from one address.

    Each twice, for two elements of a thread that want the same: scales as bits of float32, zeros as `_numbers_at`.
    """
    at, lines = f"[${2 * number}]", ["{"]
    if kind == "zeros":
        lines += [".reg .b16 both;", ".reg .b32 word;"]
        lines += (
            [f"ld.global.b32 word, {at};"]
            if number == 4
            else [f"ld.global.b16 both, {at};", "mov.b32 word, {both, both};"]
        )
    else:
        lines += [f".reg .b16 h<{number}>, z;", f".reg .b32 w<{number // 2}>;", "mov.b16 z, 0;"]
        lines.append(f"ld.global.b32 w0, {at};" if number == 2 else f"ld.global.v2.b32 {{w0, w1}}, {at};")
        lines += [f"mov.b32 {{h{2 * word}, h{2 * word + 1}}}, w{word};" for word in range(number // 2)]
    for piece in range(number):
        to = f"${2 * piece}"
        if kind == "zeros":
            lines += [f"prmt.b32 {to}, word, 0, 0x4{piece}4{piece};", f"or.b32 {to}, {to}, 0x43004300;"]
        elif kind == "float16":
            lines.append(f"cvt.f32.f16 {to}, h{piece};")
        else:
            lines.append(f"mov.b32 {to}, {{z, h{piece}}};")
        lines.append(f"mov.b32 ${2 * piece + 1}, {to};")
    return "\n".join([*lines, "}"])


_TWO_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 4 + ["l,l"]))
_FOUR_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 8 + ["l,l"]))


@triton.jit
def _wide_words(at, WIDE: tl.constexpr, PIECES: tl.constexpr):
    """Scales or zeros of consecutive pieces: one load for a row of the weight instead of one for each piece.

    A row's numbers have a cache line of their own, and looking that up takes as long as some of the row's codes.
    """
    if PIECES == 2:
        words = tl.inline_asm_elementwise(
            WIDE, _TWO_OPERANDS, [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=2
        )
    else:
        words = tl.inline_asm_elementwise(
            WIDE, _FOUR_OPERANDS, [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=2
        )
    return words


@triton.jit
def appended(values, value):
    """A tuple with one value more."""
    return values + (value,)  # noqa: RUF005 (the JIT compiler does not take (*values, value))


@triton.jit
def stay(none, STAYS: tl.constexpr):
    """`none`, which is 0 for each thread, as the assembler does not know.

    What was asked for before is not moved behind this, which would save registers, nor what needs the result before
    it: shared memory is read here, where warps leave their sums for one another. One warp alone has no such place.
    """
    found = none
    if STAYS:
        found = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; ld.volatile.shared.b32 $0, [$1];",
            "=r,r",
            [none + 1024],  # what is below is not the program's
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found & none


@triton.jit
def _read(
    first, chunk, i, low_at, high_at, scale_ptr, zero_ptr, groups, K, KIND: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, WIDE_SCALES: tl.constexpr, WIDE_ZEROS: tl.constexpr, WARPS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Codes of two lines, scales and zeros of the pieces from `first` on."""
    lows, highs, scales, zeros = (), (), (), ()
    for number in tl.static_range(PIECES):
        piece = first + number
        present = piece * 128 + 64 * chunk < K
        at = tl.multiple_of(16 * piece, 16)[:, None]
        low = tl.load(low_at + at, mask=present[:, None], other=0, eviction_policy="evict_first")
        high = tl.load(high_at + at, mask=present[:, None], other=0, eviction_policy="evict_first")
        lows, highs = appended(lows, low), appended(highs, high)
        if WIDE_SCALES == "":
            there = tl.where(present, piece, 0)
            scale, zero = _numbers_at(scale_ptr, zero_ptr, groups, there, chunk, i, KIND, GROUP, ASM)
            scales, zeros = appended(scales, scale), appended(zeros, zero)
        elif zero_ptr is None:
            zeros = appended(zeros, tl.full([32 * WARPS, 4], 0x43084308, tl.int32))
    if WIDE_SCALES != "":
        at = groups + tl.where(first * 128 < K, first, 0)[:, None]
        words = _wide_words(scale_ptr + at, WIDE_SCALES, PIECES)
        for number in tl.static_range(PIECES):
            scales = appended(scales, words[number].to(tl.float32, bitcast=True))
        if zero_ptr is not None:
            zeros = _wide_words(zero_ptr + at, WIDE_ZEROS, PIECES)
    return lows, highs, scales, zeros


@triton.jit
def _activations(x_at, first, chunk, K, PIECES: tl.constexpr):
    """Four slices of each piece."""
    xs = ()
    for number in tl.static_range(PIECES):
        present = ((first + number) * 128 + 64 * chunk < K)[:, None]
        x_piece = x_at + tl.multiple_of((first + number) * 64, 32)[:, None]
        for index in tl.static_range(4):
            xs = appended(xs, tl.load(x_piece + 8 * index, mask=present, other=0))
    return xs


@triton.jit
def _packed_fragment_kernel(
    x_ptr,  # words of two bfloat16
    codes_ptr,  # words of 32 bits
    scale_ptr,
    zero_ptr,
    line_scale_ptr,
    bias_ptr,
    ids_ptr,  # [slots] int32: the expert of each
    weights_ptr,  # [slots] float32
    out_ptr,  # [slots, width], or where weighted [TOP_K, rows, width] float32
    num_rows,
    N,
    K,
    KIND: tl.constexpr,  # of codes: int4, e2m1
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    ASM: tl.constexpr,
    WIDE_SCALES: tl.constexpr,  # assembly that reads the scales of a warp's pieces at once, or ""
    WIDE_ZEROS: tl.constexpr,
    WARPS: tl.constexpr,
    PIECES: tl.constexpr,  # of a warp, side by side
    PDL: tl.constexpr,
):
    """16 lines, of one matrix for all rows of x, or of the expert of one slot."""
    allow_dependents(PDL)
    tiles = tl.cdiv(N, 16)
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    thread, i = tl.arange(0, 32 * WARPS), tl.arange(0, 4)[None, :]
    warp, lane = thread // 32, thread % 32
    index, quarter = lane // 4, lane % 4
    chunk = quarter // 2
    row = tl.minimum(index, num_rows - 1)
    expert = tl.zeros([], tl.int64)
    if ids_ptr is not None:
        wait_for_predecessor(PDL)
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        row = index * 0 + slot // PER_ROW
    if ACTIVATION == "":
        first_line, apart = tl.minimum(16 * tile + 2 * index, N - 2), 1
    else:
        first_line, apart = tl.minimum(8 * tile + index, N // 2 - 1), N // 2
    line = expert * N + first_line
    width = tl.multiple_of(K // 8, 8)
    low_at = codes_ptr + tl.multiple_of(line * width + 4 * quarter, 4)[:, None] + i
    high_at = codes_ptr + tl.multiple_of((line + apart) * width + 4 * quarter, 4)[:, None] + i
    x_begin = 32 * chunk + 4 * (quarter % 2)
    x_at = x_ptr + tl.multiple_of(row.to(tl.int64) * (K // 2) + x_begin, 4)[:, None] + i
    groups = (line[:, None] + i // 2 * apart) * (K // GROUP)
    STEP: tl.constexpr = WARPS * PIECES
    STAYS: tl.constexpr = ASM and WARPS > 1
    begin = warp * PIECES
    none = thread * 0 + (N >> 30)
    read = _read(
        begin, chunk, i, low_at, high_at, scale_ptr, zero_ptr, groups, K,
        KIND, GROUP, ASM, WIDE_SCALES, WIDE_ZEROS, WARPS, PIECES,
    )  # fmt: skip
    wait_for_predecessor(PDL)
    acc = tl.zeros([32 * WARPS, 4], tl.float32)
    for first in range(0, tl.cdiv(K, 128), STEP):
        # Activations are asked for before the next codes, since loads come back in the order of asking. Those codes
        # are on their way while these are multiplied.
        xs = _activations(x_at, first + begin, chunk, K, PIECES)
        stay(none, STAYS)
        after = _read(
            first + STEP + begin, chunk, i, low_at, high_at, scale_ptr, zero_ptr, groups, K,
            KIND, GROUP, ASM, WIDE_SCALES, WIDE_ZEROS, WARPS, PIECES,
        )  # fmt: skip
        none = stay(none, STAYS)
        lows, highs, scales, zeros = read
        for number in tl.static_range(PIECES):
            x0, x1, x2, x3 = xs[4 * number], xs[4 * number + 1], xs[4 * number + 2], xs[4 * number + 3]
            zero = zeros[number] + none[:, None]
            part = _piece_matmul(lows[number], highs[number], x0, x1, x2, x3, zero, KIND, ASM, WARPS)
            acc += part if KIND == "e2m1" else part * scales[number]
        read = after
    sums = tl.reshape(tl.sum(tl.reshape(acc, [WARPS, 32, 4]), axis=0), [8, 4, 2, 2])  # as matrix units have them
    out = tl.reshape(tl.permute(sums, (0, 2, 1, 3)), [16, 8])
    put(
        out, tile, slot, expert, line_scale_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr, num_rows, N,
        KIND, ACTIVATION, TOP_K,
    )  # fmt: skip


@triton.jit
def put(
    out, tile, slot, expert, line_scale_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr, num_rows, N,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Store some lines of 8 tokens, of which an expert's slot has the first."""
    LINES: tl.constexpr = out.shape[0]
    if KIND == "e2m1":
        out *= 9223372036854775808.0  # 2 ** 63
    lines, outputs, width = lines_of(tile, N, LINES, ACTIVATION != "")
    line, line_mask = expert * N + lines, outputs < width
    if line_scale_ptr is not None:
        out *= tl.load(line_scale_ptr + line, mask=line_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + line, mask=line_mask, other=0.0).to(tl.float32)[:, None]
    token = tl.arange(0, 8)
    place = token
    inside = token < num_rows
    if ids_ptr is not None:
        place = token + slot
        inside = token < 1
    if ACTIVATION != "":
        out = activated(out, tl.bfloat16, LINES, 8, ACTIVATION)
        outputs = tile * (LINES // 2) + tl.arange(0, LINES // 2)
    if TOP_K > 0:
        out = weighted(out, weights_ptr, place, inside, tl.bfloat16)
        place = place % TOP_K * num_rows + place // TOP_K
    at = place.to(tl.int64)[None, :] * width + outputs[:, None]
    mask = inside[None, :] & (outputs < width)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def fragments_fit(x: Tensor, *weights: PackedWeight) -> bool:
    """Whether the kernel takes these weights, and this device has its instructions (or the interpreter runs)."""
    if torch.cuda.is_available() and not has_packed_arithmetic():
        return False
    if x.dtype != torch.bfloat16 or x.data_ptr() % _ALIGNMENT:
        return False
    return all(_fits(weight) for weight in weights)


def _fits(weight: PackedWeight) -> bool:
    if weight.is_fine or weight.codes.data_ptr() % _ALIGNMENT or weight.sizes[1] % 2:
        return False
    if weight.is_float:
        return weight.group == 32 and weight.scales.dtype == torch.uint8
    if weight.scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return not weight.has_bytes and weight.group % _COLUMNS == 0


def _wide_fits(weight: PackedWeight, pieces: int) -> bool:
    """Whether each piece has a scale of its own, and those of a warp are aligned and all there."""
    is_short = weight.scales.dtype in (torch.float16, torch.bfloat16)
    return pieces in (2, 4) and weight.group == _COLUMNS and is_short and weight.sizes[2] // _COLUMNS % pieces == 0


def packed_fragments(
    x: Tensor,
    expert_ids: Tensor | None,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str = "",
    weights: Tensor | None = None,
    *,
    per_row: int = 1,
    warps: int = 8,
    pieces: int = 4,
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], as `packed_tiles`.

    Without `expert_ids` there is one matrix, and every line of x, of which there are at most 8, is a slot.
    """
    _, n, k = weight.sizes
    num_slots = x.shape[0] if expert_ids is None else expert_ids.numel()
    assert expert_ids is not None or num_slots <= MAX_TOKENS
    out = empty_slots(x, num_slots, n // 2 if activation else n, weights)
    _, scales, zeros, _, line_scale = _parts(weight)
    rows = num_slots if expert_ids is None else out.shape[1]
    wide_scales = ""
    if torch.cuda.is_available() and _wide_fits(weight, pieces):
        wide_scales = _wide_assembly(str(weight.scales.dtype).removeprefix("torch."), pieces)
    _packed_fragment_kernel[(triton.cdiv(n, _LINES) * (1 if expert_ids is None else num_slots),)](
        x.view(torch.int32),
        weight.codes.view(torch.int32),
        scales,
        zeros,
        line_scale,
        bias,
        expert_ids,
        out if weights is None else weights,
        out,
        rows,
        n,
        k,
        KIND=_kind(weight),
        ACTIVATION=activation,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        GROUP=weight.group,
        ASM=torch.cuda.is_available(),
        WIDE_SCALES=wide_scales,
        WIDE_ZEROS=_wide_assembly("zeros", pieces) if wide_scales else "",
        WARPS=warps,
        PIECES=pieces,
        num_warps=warps,
        **launch_options(),
    )
    return out
