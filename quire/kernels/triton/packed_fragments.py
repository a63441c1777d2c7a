"""Matmuls of up to 8 tokens with packed weights: matrix instructions whose operands never leave registers.

A warp multiplies 16 lines by 8 tokens. Codes go from memory to registers, are unpacked with a few bit operations and
given to the matrix unit as they are; there is no shared memory in the loop and nothing to wait for but what is read.
A matrix instruction has 16 columns side by side, in their order, and a warp a whole split of the inner sum, so that
bits are those of `packed_wide`, and of bytes `packed_tiles`, with the same splits: the unit adds the columns of one
instruction at once, and which thread has which of them is all the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.packed import CHUNK, PIECE, PackedWeight
from quire.kernels.triton.grouped_matmul import activated, empty_slots, weighted
from quire.kernels.triton.launch import allow_dependents, launch_options, multiprocessors, wait_for_predecessor
from quire.kernels.triton.packed_matmul import _kind, _parts, has_packed_arithmetic
from quire.kernels.triton.tile_matmul import lines_of
from quire.kernels.triton.widen import BYTE_REGISTERS, byte_assembly, four_floats

MAX_TOKENS = 8
_ALIGNMENT = 8  # bytes
_WARPS, _WARPS_BYTES = 4, 2  # of a program, unless there are more splits: of bytes there are few in all
# Chunks that a warp reads while it multiplies as many, the same of bytes, and for how many warps a multiprocessor has
# the registers.
_FAR, _FAR_BYTES, _WARPS_FAR = 6, 6, 12
_NEAR, _NEAR_BYTES, _WARPS_NEAR = 4, 2, 16
_ONCE_BYTES = 8  # chunks of a split of bytes that are read all at once, instead of some ahead


def _assembly(kind: str) -> str:
    """A chunk's matmul: $0-3 are the sums $20-23 of two lines, each for two tokens, and what 64 columns add to them.

    Of each line there are two words ($4-5, $6-7) and two zeros or powers ($16-17, $18-19), of bytes two words more;
    of x there are two words a slice.
    """
    sums = "{$0, $1, $2, $3}"
    lines = ["{", ".reg .b32 a<4>, part, sign;", BYTE_REGISTERS]
    lines += [f"mov.b32 ${index}, ${20 + index};" for index in range(4)]
    for piece in range(4):
        for line in range(2):
            if kind in ("int8", "e4m3"):
                word = 4 + 2 * line + piece if piece < 2 else 14 + 2 * line + piece
                lines += byte_assembly(kind, f"${word}", f"a{line}", f"a{2 + line}")
                continue
            for word in range(2):
                lines += _unpacked(kind, f"a{line + 2 * word}", 4 + 2 * line + word, piece, 16 + 2 * line)
        x = f"{{${8 + 2 * piece}, ${9 + 2 * piece}}}"
        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {{a0, a1, a2, a3}}, {x}, {sums};")
    return "\n".join([*lines, "}"])


def _unpacked(kind: str, to: str, word: int, piece: int, number: int) -> list[str]:
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
_INT8: tl.constexpr = tl.constexpr(_assembly("int8"))
_E4M3: tl.constexpr = tl.constexpr(_assembly("e4m3"))
_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 20))


@triton.jit
def _chunk_matmul(low, high, xs, zero, more, acc, upper, KIND: tl.constexpr, ASM: tl.constexpr, WARPS: tl.constexpr):
    """Sums of two lines of a thread [threads, 2 tokens] and what a chunk adds to them."""
    if ASM:
        CODE: tl.constexpr = (
            _INT4 if KIND == "int4" else _E2M1 if KIND == "e2m1" else _INT8 if KIND == "int8" else _E4M3
        )
        return tl.inline_asm_elementwise(
            CODE, _OPERANDS, [low, high, xs[0], xs[1], xs[2], xs[3], zero, more, acc, upper],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    for index in tl.static_range(4):
        acc += _slice_sums(low, xs[index], zero, index, KIND, WARPS)
        upper += _slice_sums(high, xs[index], more, index, KIND, WARPS)
    return acc, upper


@triton.jit
def _slice_sums(words, x, zero, SLICE: tl.constexpr, KIND: tl.constexpr, WARPS: tl.constexpr):
    """What one slice of words of 8 lines gives for each of 8 tokens, as matrix units have them."""
    first, second = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
    if KIND == "int8" or KIND == "e4m3":
        even, odd = tl.split(words if SLICE < 2 else zero)
        a0, a1, a2, a3 = four_floats((even if SLICE % 2 == 0 else odd)[:, None], KIND)
        is_first = tl.arange(0, 2)[None, :] == 0
        a, b = tl.where(is_first, a0, a2), tl.where(is_first, a1, a3)
    else:
        first_half, second_half = tl.split(_plain(zero))
        zeros = (first_half if SLICE < 2 else second_half)[:, None]
        a, b = _half_values(words, 4 * SLICE, zeros, KIND), _half_values(words, 16 + 4 * SLICE, zeros, KIND)
    sums = tl.reshape(a, [WARPS, 8, 1, 8]) * tl.reshape(first, [WARPS, 1, 8, 8])
    sums += tl.reshape(b, [WARPS, 8, 1, 8]) * tl.reshape(second, [WARPS, 1, 8, 8])
    return tl.reshape(tl.sum(sums, axis=3), [32 * WARPS, 2])


@triton.jit
def _plain(bits):
    """The lower bfloat16 of words as float32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _half_values(words, SHIFT: tl.constexpr, zeros, KIND: tl.constexpr):
    """The codes at some bits of words, as float32."""
    code = (words >> SHIFT) & 15
    if KIND == "int4":
        return _plain(code + 0x4300) - zeros
    return _plain(((code & 8) << 12) | ((code & 7) << 6)) * zeros


@triton.jit
def _numbers_at(scale_ptr, zero_ptr, groups, i, KIND: tl.constexpr, ASM: tl.constexpr):
    """The scale of a group of a line, and what is taken from or multiplied into its weights, twice in a word.

    E2M1 have two groups in a chunk, of which the first is given.
    """
    at = groups[:, None] + i * (KIND == "e2m1")
    if KIND == "e2m1":
        zero = _powers_at(scale_ptr, at, ASM)
        scale = zero
    else:
        scale = _scale_at(scale_ptr, at, ASM)
        if KIND != "int4":
            zero = at.to(tl.int32)
        elif zero_ptr is None:
            zero = tl.full(at.shape, 0x43084308, tl.int32)
        else:
            zero = _byte_at(zero_ptr, groups[:, None], ASM) * 0x00010001 + 0x43004300
            zero = tl.broadcast_to(zero, at.shape)
    return scale, zero


@triton.jit
def _scale_at(scale_ptr, at, ASM: tl.constexpr):
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
def _byte_at(ptr, at, ASM: tl.constexpr):
    """Bytes as int32."""
    if not ASM:
        return tl.load(ptr + at).to(tl.int32) & 255
    return tl.inline_asm_elementwise(
        "ld.global.u8 $0, [$1];", "=r,l", [ptr + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _powers_at(scale_ptr, at, ASM: tl.constexpr):
    """2 ** 63 times the powers of two whose exponents stand side by side, twice the same bfloat16."""
    if not ASM:
        return (_byte_at(scale_ptr, at, ASM) + 63) * 0x00800080
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


@triton.jit
def _appended(values, value):
    """A tuple with one value more."""
    return values + (value,)  # noqa: RUF005 (the JIT compiler does not take (*values, value))


@triton.jit
def _stay(none, STAYS: tl.constexpr):
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
def _codes_at(codes_ptr, line, quarter, i, K, KIND: tl.constexpr):
    """Where a thread's two words of a line's first chunk are; of bytes it has two more, 8 words behind."""
    if KIND == "int8" or KIND == "e4m3":
        at = codes_ptr + (line * (K // 4) + quarter)[:, None] + 4 * i
    else:
        at = codes_ptr + tl.multiple_of(line * tl.multiple_of(K // 8, 8) + 2 * quarter, 2)[:, None] + i
    return at


@triton.jit
def _words_at(at, ASM: tl.constexpr):
    """Words that are not side by side, two for a thread; by assembly, as `_scale_at`."""
    if not ASM:
        return tl.load(at)
    return tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$2]; ld.global.b32 $1, [$3];",
        "=&r,=&r,l,l", [at], dtype=tl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def _read(
    chunk, last, i, low_at, high_at, scale_ptr, zero_ptr, groups, more_groups, KIND: tl.constexpr,
    GROUP: tl.constexpr, SUM: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros of two lines, of AHEAD chunks from `chunk` on. What is behind `last` is not used.

    Of bytes the second half of a chunk's codes stand where zeros do, one for each chunk.
    """
    BYTES: tl.constexpr = KIND == "int8" or KIND == "e4m3"
    WORDS: tl.constexpr = 16 if BYTES else 8
    lows, highs, scales, zeros, more_scales, more_zeros = (), (), (), (), (), ()
    exists = chunk < last
    first = tl.where(exists, chunk, 0)
    for number in tl.static_range(AHEAD):
        present = exists if EVEN else chunk + number < last
        this = first + number if EVEN else tl.where(present, chunk + number, 0)
        if BYTES:
            at = WORDS * (first if EVEN else this)[:, None]
            near = WORDS * number if EVEN else 0
            lows = _appended(lows, _words_at(low_at + at + near, ASM))
            highs = _appended(highs, _words_at(high_at + at + near, ASM))
            zeros = _appended(zeros, _words_at(low_at + at + (near + 8), ASM))
            more_zeros = _appended(more_zeros, _words_at(high_at + at + (near + 8), ASM))
        else:
            low = low_at + tl.multiple_of(WORDS * chunk, WORDS)[:, None] + WORDS * number
            high = high_at + tl.multiple_of(WORDS * chunk, WORDS)[:, None] + WORDS * number
            mask = present[:, None]
            lows = _appended(lows, tl.load(low, mask=mask, other=None if EVEN else 0, eviction_policy="evict_first"))
            highs = _appended(
                highs, tl.load(high, mask=mask, other=None if EVEN else 0, eviction_policy="evict_first")
            )
        if number % SUM == 0:
            group = first * 64 // GROUP + number * 64 // GROUP if EVEN else this * 64 // GROUP
            scale, zero = _numbers_at(scale_ptr, zero_ptr, groups + group, i, KIND, ASM)
            more_scale, more = _numbers_at(scale_ptr, zero_ptr, more_groups + group, i, KIND, ASM)
            scales, more_scales = _appended(scales, scale), _appended(more_scales, more_scale)
            if not BYTES:
                zeros, more_zeros = _appended(zeros, zero), _appended(more_zeros, more)
    return lows, highs, scales, zeros, more_scales, more_zeros


@triton.jit
def _activations(x_at, chunk, last, AHEAD: tl.constexpr, EVEN: tl.constexpr):
    """Four slices of each chunk."""
    xs = ()
    x_at += tl.multiple_of(32 * chunk, 32)[:, None]
    for number in tl.static_range(AHEAD):
        for index in tl.static_range(4):
            slice_at = x_at + (32 * number + 8 * index)
            x = tl.load(slice_at) if EVEN else tl.load(slice_at, mask=(chunk + number < last)[:, None], other=0)
            xs = _appended(xs, x)
    return xs


@triton.jit
def _in_order(parts, TILES: tl.constexpr, SPLITS: tl.constexpr):
    """[TILES, 32, 2, 2, SPLITS] -> the sums over splits, one after the other."""
    if SPLITS == 1:
        sums = tl.reshape(parts, [TILES, 32, 2, 2])
    elif SPLITS == 2:
        first, second = tl.split(parts)
        sums = first + second
    elif SPLITS == 4:
        first, third, second, fourth = _split_four(parts, TILES)
        sums = first + second + third + fourth
    else:
        even, odd = tl.split(tl.reshape(parts, [TILES, 32, 2, 2, 4, 2]))
        first, fifth, third, seventh = _split_four(even, TILES)
        second, sixth, fourth, eighth = _split_four(odd, TILES)
        sums = first + second + third + fourth + fifth + sixth + seventh + eighth
    return sums


@triton.jit
def _split_four(parts, TILES: tl.constexpr):
    """Parts 0, 2, 1 and 3 of [TILES, 32, 2, 2, 4]."""
    even, odd = tl.split(tl.reshape(parts, [TILES, 32, 2, 2, 2, 2]))
    a, b = tl.split(even)
    c, d = tl.split(odd)
    return a, b, c, d


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
    chunks_per_split,
    KIND: tl.constexpr,  # of codes: int4, e2m1, int8, e4m3
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    SUM: tl.constexpr,  # chunks that are summed before they are scaled; of e2m1 weights are, exactly
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,  # of the inner sum, of a warp each
    TILES: tl.constexpr,  # of 16 lines, of SPLITS warps each
    AHEAD: tl.constexpr,  # chunks at a time, whole sums
    EVEN: tl.constexpr,  # iterations divide a split evenly and are aligned with quantization groups
    ONCE: tl.constexpr,  # a split is one iteration
    PDL: tl.constexpr,
):
    """Some lines, of one matrix for all rows of x, or of the expert of one slot."""
    allow_dependents(PDL)
    WARPS: tl.constexpr = SPLITS * TILES
    ZEROS: tl.constexpr = 1 if KIND == "int8" or KIND == "e4m3" else SUM  # chunks that have the same
    tiles = tl.cdiv(N, 16 * TILES)
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    thread, i = tl.arange(0, 32 * WARPS), tl.arange(0, 2)[None, :]
    warp, lane = thread // 32, thread % 32
    index, quarter = lane // 4, lane % 4
    row = tl.minimum(index, num_rows - 1)
    expert = tl.zeros([], tl.int64)
    if ids_ptr is not None:
        wait_for_predecessor(PDL)
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        row = index * 0 + slot // PER_ROW
    line_tile = tile * TILES + warp // SPLITS
    if ACTIVATION == "":
        first_line, apart = tl.minimum(16 * line_tile + 2 * index, N - 2), 1
    else:
        first_line, apart = tl.minimum(8 * line_tile + index, N // 2 - 1), N // 2
    line = expert * N + first_line
    low_at = _codes_at(codes_ptr, line, quarter, i, K, KIND)
    high_at = _codes_at(codes_ptr, line + apart, quarter, i, K, KIND)
    x_at = x_ptr + tl.multiple_of(row.to(tl.int64) * (K // 2) + 2 * quarter, 2)[:, None] + i
    groups, more_groups = line * (K // GROUP), (line + apart) * (K // GROUP)
    begin = warp % SPLITS * chunks_per_split
    last = tl.minimum(begin + chunks_per_split, K // 64)
    none = thread * 0 + (N >> 30)
    read = _read(
        begin, last, i, low_at, high_at, scale_ptr, zero_ptr, groups, more_groups, KIND, GROUP, SUM, ASM, AHEAD, EVEN
    )
    wait_for_predecessor(PDL)
    acc = tl.zeros([32 * WARPS, 2], tl.float32)
    upper = tl.zeros([32 * WARPS, 2], tl.float32)
    for first in range(0, chunks_per_split, AHEAD):
        # Activations are asked for before the next codes, since loads come back in the order of asking. Those codes
        # are on their way while these are multiplied.
        xs = _activations(x_at, begin + first, last, AHEAD, EVEN)
        _stay(none, ASM)
        after = read
        if not ONCE:
            after = _read(
                begin + first + AHEAD, last, i, low_at, high_at, scale_ptr, zero_ptr, groups, more_groups,
                KIND, GROUP, SUM, ASM, AHEAD, EVEN,
            )  # fmt: skip
        none = _stay(none, ASM)
        lows, highs, scales, zeros, more_scales, more_zeros = read
        part, more = tl.zeros_like(acc), tl.zeros_like(upper)
        for number in tl.static_range(AHEAD):
            slices = (xs[4 * number], xs[4 * number + 1], xs[4 * number + 2], xs[4 * number + 3])
            zero, other = zeros[number // ZEROS] + none[:, None], more_zeros[number // ZEROS] + none[:, None]
            if KIND == "e2m1":
                acc, upper = _chunk_matmul(
                    lows[number], highs[number], slices, zero, other, acc, upper, KIND, ASM, WARPS
                )
            else:
                if number % SUM == 0:
                    part, more = tl.zeros_like(acc), tl.zeros_like(upper)
                part, more = _chunk_matmul(
                    lows[number], highs[number], slices, zero, other, part, more, KIND, ASM, WARPS
                )
                if number % SUM == SUM - 1:
                    acc += part * scales[number // SUM]
                    upper += more * more_scales[number // SUM]
        read = after
    both = tl.reshape(tl.join(acc, upper), [TILES, SPLITS, 32, 2, 2])
    sums = _in_order(tl.permute(both, (0, 2, 3, 4, 1)), TILES, SPLITS)
    out = tl.permute(tl.reshape(sums, [8 * TILES, 4, 2, 2]), (0, 3, 1, 2))
    _put(
        tl.reshape(out, [16 * TILES, 8]), tile, slot, expert, line_scale_ptr, bias_ptr, ids_ptr, weights_ptr,
        out_ptr, num_rows, N, KIND, ACTIVATION, TOP_K,
    )  # fmt: skip


@triton.jit
def _put(
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
    return weight.group % PIECE == 0 or weight.group == CHUNK


def _splits(weight: PackedWeight, slots: int) -> int:
    """Splits of the inner sum, so that all warps are there at once if they can be."""
    tiles = triton.cdiv(weight.sizes[1], 16) * slots
    most = _WARPS_NEAR * multiprocessors()
    return next((count for count in (8, 4, 2) if tiles * count <= most), 1)


def _ahead(weight: PackedWeight, slots: int, splits: int, chunks: int, in_sum: int) -> list[int]:
    """Numbers of chunks to read ahead, of a split of `chunks`, whole sums, the best first."""
    has_room = triton.cdiv(weight.sizes[1], 16) * slots * splits <= _WARPS_FAR * multiprocessors()
    if weight.has_bytes and has_room and chunks <= _ONCE_BYTES:
        return [chunks]
    near, far = (_NEAR_BYTES, _FAR_BYTES) if weight.has_bytes else (_NEAR, _FAR)
    return [size for size in range(far if has_room else near, 1, -1) if size % in_sum == 0]


def _is_even(chunks: int, ahead: int, group: int) -> bool:
    """Whether iterations of `ahead` chunks divide a split evenly and are aligned with quantization groups."""
    columns = CHUNK * ahead
    return chunks % ahead == 0 and (columns % group == 0 or group % columns == 0)


def packed_fragments(
    x: Tensor,
    expert_ids: Tensor | None,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str = "",
    weights: Tensor | None = None,
    *,
    per_row: int = 1,
    columns: int = PIECE,
    splits: int | None = None,
    ahead: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], as `packed_tiles`.

    Without `expert_ids` there is one matrix, and every line of x, of which there are at most 8, is a slot. The bits
    are those of `packed_wide` with these `splits` and `columns`, its `shape.bk`.
    """
    _, n, k = weight.sizes
    num_slots = x.shape[0] if expert_ids is None else expert_ids.numel()
    assert expert_ids is not None or num_slots <= MAX_TOKENS
    out = empty_slots(x, num_slots, n // 2 if activation else n, weights)
    _, scales, zeros, _, line_scale = _parts(weight)
    bk = CHUNK if weight.is_float else min(columns, weight.group)
    slots = 1 if expert_ids is None else num_slots
    splits = splits or _splits(weight, slots)
    tiles = max(1, (warps or (_WARPS_BYTES if weight.has_bytes else _WARPS)) // splits)
    chunks = triton.cdiv(triton.cdiv(k, splits), bk) * (bk // CHUNK)
    sizes = _ahead(weight, slots, splits, chunks, bk // CHUNK) if ahead is None else [ahead]
    assert all(size % (bk // CHUNK) == 0 for size in sizes)
    is_even = [k == splits * chunks * CHUNK and _is_even(chunks, size, weight.group) for size in sizes]
    ahead = sizes[is_even.index(True)] if any(is_even) else sizes[0]
    _packed_fragment_kernel[(triton.cdiv(n, 16 * tiles) * slots,)](
        x.view(torch.int32),
        weight.codes.view(torch.int32),
        scales,
        zeros,
        line_scale,
        bias,
        expert_ids,
        out if weights is None else weights,
        out,
        num_slots if expert_ids is None else out.shape[1],
        n,
        k,
        chunks,
        KIND=_kind(weight),
        ACTIVATION=activation,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        GROUP=weight.group,
        SUM=bk // CHUNK,
        ASM=torch.cuda.is_available(),
        SPLITS=splits,
        TILES=tiles,
        AHEAD=ahead,
        EVEN=any(is_even),
        ONCE=ahead == chunks,
        num_warps=splits * tiles,
        **launch_options(),
    )
    return out
