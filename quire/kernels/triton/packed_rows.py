"""Matmuls of few slots with packed weights: multiply and add over long pieces of lines, without matrix instructions.

A thread reads 16 bytes of a line, which have one scale or two. Codes become float32 by setting bits alone: integers
in the last places of a power of two, 4-bit floats where exponent and mantissa of a float32 meet. What that adds or
takes is put right once for each 4 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.packed import CHUNK, PackedWeight
from quire.kernels.triton.grouped_matmul import _put_line, empty_slots
from quire.kernels.triton.launch import allow_dependents, begin_dependent, launch_options, wait_for_predecessor
from quire.kernels.triton.matmul import arrival_counters
from quire.kernels.triton.packed_matmul import _kind, _parts
from quire.kernels.triton.packed_values import scale_of
from quire.kernels.triton.tile_matmul import add_splits, lines_of
from quire.kernels.triton.widen import four_floats

_FEW_BYTES = 512  # of a line at a time; twice as many of long ones


@triton.jit
def _pair(x_ptr, at, mask, SLICE: tl.constexpr, FACTOR: tl.constexpr):
    """Two neighbours of x, float32 times FACTOR, for each word of 32 bits."""
    if x_ptr.dtype.element_ty == tl.bfloat16:
        both = tl.load(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at + 8 * SLICE, mask=mask, other=0)
        low = (both << 16).to(tl.float32, bitcast=True)
        high = (both & -65536).to(tl.float32, bitcast=True)
    else:
        low = tl.load(x_ptr + 2 * at + 16 * SLICE, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + 2 * at + 16 * SLICE + 1, mask=mask, other=0.0).to(tl.float32)
    return low * FACTOR, high * FACTOR


@triton.jit
def _integers(words, ASM: tl.constexpr):
    """Codes of a word, first those of its lower half: as float32, some of them 128 or 2048 more than themselves.

    Slices 0 to 3 of the lower half are 0, 2048, 128 and 2048 more, of the upper half 128, 0, 2048 and 128: a code in
    the last places of a power of two needs no shift of its own.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 left, right, part;
            shl.b32 left, $8, 8;
            shr.u32 right, $8, 12;
            lop3.b32 part, left, 0xF00, 0x47000000, 0xEA;
            add.f32 $0, part, 0fC7000000;
            lop3.b32 $1, left, 0xF000, 0x45000000, 0xEA;
            lop3.b32 $2, left, 0xF0000, 0x43000000, 0xEA;
            lop3.b32 $3, $8, 0xF000, 0x45000000, 0xEA;
            lop3.b32 $4, $8, 0xF0000, 0x43000000, 0xEA;
            lop3.b32 part, right, 0xF00, 0x47000000, 0xEA;
            add.f32 $5, part, 0fC7000000;
            lop3.b32 $6, right, 0xF000, 0x45000000, 0xEA;
            lop3.b32 $7, right, 0xF0000, 0x43000000, 0xEA;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    a0, a1 = (words & 15).to(tl.float32), ((words >> 4) & 15).to(tl.float32) + 2048.0
    a2, a3 = ((words >> 8) & 15).to(tl.float32) + 128.0, ((words >> 12) & 15).to(tl.float32) + 2048.0
    b0, b1 = ((words >> 16) & 15).to(tl.float32) + 128.0, ((words >> 20) & 15).to(tl.float32)
    b2, b3 = ((words >> 24) & 15).to(tl.float32) + 2048.0, ((words >> 28) & 15).to(tl.float32) + 128.0
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _float_pair(words, SIGN: tl.constexpr, REST: tl.constexpr):
    """E2M1 in both halves of a word, moved by SIGN and REST bits, as float32: 2 ** -126 of what they mean."""
    sign = (words << SIGN) & -2147450880  # 0x80008000
    rest = (words << REST) & 0x01C001C0 if REST > 0 else (words >> -REST) & 0x01C001C0
    both = sign | rest
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _floats(words, ASM: tl.constexpr):
    """The same of E2M1, each 2 ** -126 of what it means."""
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sign, part;
            shl.b32 sign, $8, 12;
            and.b32 sign, sign, 0x80008000;
            shl.b32 part, $8, 6;
            lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
            shl.b32 $0, part, 16;
            and.b32 $4, part, 0xFFFF0000;
            shl.b32 sign, $8, 8;
            and.b32 sign, sign, 0x80008000;
            shl.b32 part, $8, 2;
            lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
            shl.b32 $1, part, 16;
            and.b32 $5, part, 0xFFFF0000;
            shl.b32 sign, $8, 4;
            and.b32 sign, sign, 0x80008000;
            shr.u32 part, $8, 2;
            lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
            shl.b32 $2, part, 16;
            and.b32 $6, part, 0xFFFF0000;
            and.b32 sign, $8, 0x80008000;
            shr.u32 part, $8, 6;
            lop3.b32 part, part, 0x01C001C0, sign, 0xEA;
            shl.b32 $3, part, 16;
            and.b32 $7, part, 0xFFFF0000;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    a0, b0 = _float_pair(words, 12, 6)
    a1, b1 = _float_pair(words, 8, 2)
    a2, b2 = _float_pair(words, 4, -2)
    a3, b3 = _float_pair(words, 0, -6)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _of_words(grid, LINES: tl.constexpr, QUADS: tl.constexpr):
    """A number for each 16 bytes [LINES, QUADS] -> one for each word."""
    return tl.reshape(tl.broadcast_to(grid[:, :, None], [LINES, QUADS, 4]), [LINES, 4 * QUADS])


@triton.jit
def _words_times_row(
    x_ptr,
    codes_ptr,  # words of 32 bits
    scale_ptr,
    zero_ptr,
    line,
    inside,
    begin,
    end,
    K,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """[LINES] float32: columns from begin to end of one row of x times those of some lines."""
    QUADS: tl.constexpr = WORDS // 4
    FACTOR: tl.constexpr = 18446744073709551616.0 if KIND == "e2m1" else 1.0  # 2 ** 64
    word, quad = tl.arange(0, WORDS), tl.arange(0, QUADS)
    x_at = word // 8 * 32 + word % 8
    width = tl.multiple_of(K // 8, 8)
    last = tl.multiple_of(end // 8, 8)
    codes_at = codes_ptr + line[:, None] * width + word[None, :]
    groups = line * (K // GROUP)
    acc = tl.zeros([LINES, WORDS], tl.float32)
    for start in range(begin, end, 8 * WORDS):
        first = tl.multiple_of(start // 8, 8)
        present = first + word < last
        words = tl.load(
            codes_at + first, mask=inside[:, None] & present[None, :], other=0, eviction_policy="evict_first"
        )
        there = inside[:, None] & (first + 4 * quad < last)[None, :]
        at = groups[:, None] + ((start + quad // 2 * 64) // GROUP)[None, :]
        scale = _of_words(scale_of(scale_ptr, at, there), LINES, QUADS)
        x0, y0 = _pair(x_ptr, start // 2 + x_at, present, 0, FACTOR)
        x1, y1 = _pair(x_ptr, start // 2 + x_at, present, 1, FACTOR)
        x2, y2 = _pair(x_ptr, start // 2 + x_at, present, 2, FACTOR)
        x3, y3 = _pair(x_ptr, start // 2 + x_at, present, 3, FACTOR)
        if KIND == "e2m1":
            a0, a1, a2, a3, b0, b1, b2, b3 = _floats(words, ASM)
            low = a0 * x0[None, :]
            high = a2 * x2[None, :]
        else:
            a0, a1, a2, a3, b0, b1, b2, b3 = _integers(words, ASM)
            more = (x1 * 2048.0 + y0 * 128.0)[None, :]
            more_high = ((x3 + y2) * 2048.0 + (x2 + y3) * 128.0)[None, :]
            if zero_ptr is None:
                low = a0 * x0[None, :] - ((x0 + y0 + x1 + y1) * 8.0)[None, :] - more
                high = a2 * x2[None, :] - ((x2 + y2 + x3 + y3) * 8.0)[None, :] - more_high
            else:
                zero = _of_words(-tl.load(zero_ptr + at, mask=there, other=0).to(tl.float32), LINES, QUADS)
                low = a0 * x0[None, :] + (zero * (x0 + y0 + x1 + y1)[None, :] - more)
                if GROUP == 32:
                    zero = _of_words(-tl.load(zero_ptr + at + 1, mask=there, other=0).to(tl.float32), LINES, QUADS)
                high = a2 * x2[None, :] + (zero * (x2 + y2 + x3 + y3)[None, :] - more_high)
        low += b0 * y0[None, :]
        low += a1 * x1[None, :]
        low += b1 * y1[None, :]
        high += b2 * y2[None, :]
        high += a3 * x3[None, :]
        high += b3 * y3[None, :]
        if GROUP == 32:
            acc += low * scale
            acc += high * _of_words(scale_of(scale_ptr, at + 1, there), LINES, QUADS)
        else:
            acc += (low + high) * scale
    out = tl.sum(acc, axis=1)
    return out * 4611686018427387904.0 if KIND == "e2m1" else out  # 2 ** 62


def _fours_assembly() -> str:
    """Four neighbours of x, bfloat16, for each of four words of codes side by side: one address for all."""
    lines = ["{", ".reg .b32 a<8>;"]
    lines += [
        f"ld.global.v4.b32 {{{', '.join(f'a{4 * half + part}' for part in range(4))}}}, [$16+{16 * half}];"
        for half in range(2)
    ]
    for word in range(4):
        for pair in range(2):
            both = f"a{2 * word + pair}"
            lines.append(f"shl.b32 ${8 * pair + word}, {both}, 16;")
            lines.append(f"and.b32 ${8 * pair + 4 + word}, {both}, 0xFFFF0000;")
    return "\n".join([*lines, "}"])


_FOURS: tl.constexpr = tl.constexpr(_fours_assembly())
_FOURS_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 16 + ["l"] * 4))


@triton.jit
def _fours(at):
    """Four neighbours of x, bfloat16, as float32; a thread has four words of codes side by side.

    By assembly: what the compiler loads it lays out for loading, and then moves through shared memory.
    """
    return tl.inline_asm_elementwise(
        _FOURS, _FOURS_OPERANDS, [at], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=4
    )


@triton.jit
def _float_at(at):
    """The same of one float32."""
    return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at], tl.float32, is_pure=False, pack=1)


@triton.jit
def _bytes_times_row(
    x_ptr,
    codes_ptr,  # words of 32 bits
    scale_ptr,
    line,
    first_line,
    inside,
    begin,
    end,
    N,
    K,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PIECES: tl.constexpr,  # at a time
    WORDS: tl.constexpr,  # of a piece, which has one scale
    EVEN: tl.constexpr,  # all pieces are there, x is bfloat16, and lines have the same scales
    GATED: tl.constexpr,
    WAITS: tl.constexpr,
):
    """The same of weights that are bytes; those that come next are on their way while some are multiplied.

    WAITS: x is of the kernel before, which may still run; weights are not.
    """
    piece = tl.arange(0, PIECES) * WORDS
    word = piece[:, None] + tl.arange(0, WORDS)[None, :]
    width = tl.multiple_of(K // 4, 16)
    first, last = tl.multiple_of(begin // 4, 16), tl.multiple_of(end // 4, 16)
    codes_at = codes_ptr + line[:, None, None] * width + word[None, :, :]
    groups = line * (K // GROUP)
    groups_of_first = first_line.to(tl.int64) * (K // GROUP)
    exists = inside[:, None, None]
    words = tl.load(codes_at + first, mask=exists & (first + word < last)[None, :, :], other=0)
    wait_for_predecessor(WAITS)
    acc = tl.zeros([LINES, PIECES, WORDS], tl.float32)
    for start in range(first, last, PIECES * WORDS):
        present = start + word < last
        if EVEN:
            x0, x1, x2, x3 = _fours(x_ptr + 4 * (start + word))
            group = 4 * (start + piece) // GROUP
            scale = _float_at(scale_ptr + groups_of_first + group)[None, :, None]
            if GATED:
                more = _float_at(scale_ptr + groups_of_first + N // 2 * (K // GROUP) + group)[None, :, None]
                scale = tl.where((tl.arange(0, LINES) % 2 == 0)[:, None, None], scale, more)
        else:
            x0, x1 = _pair(x_ptr, 2 * (start + word), present, 0, 1.0)
            x2, x3 = _pair(x_ptr, 2 * (start + word) + 1, present, 0, 1.0)
            there = inside[:, None] & (start + piece < last)[None, :]
            at = groups[:, None] + (4 * (start + piece) // GROUP)[None, :]
            scale = scale_of(scale_ptr, at, there)[:, :, None]
        a0, a1, a2, a3 = four_floats(words, KIND)
        sums = a0 * x0[None, :, :]
        sums += a1 * x1[None, :, :]
        sums += a2 * x2[None, :, :]
        sums += a3 * x3[None, :, :]
        acc += sums * scale
        ahead = start + PIECES * WORDS
        words = tl.load(codes_at + ahead, mask=exists & (ahead + word < last)[None, :, :], other=0)
    return tl.sum(tl.sum(acc, axis=2), axis=1)


CHUNK_COLUMNS: tl.constexpr = tl.constexpr(CHUNK)


@triton.jit
def _packed_row_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    line_scale_ptr,
    bias_ptr,
    ids_ptr,  # [slots] int32: the expert of each
    weights_ptr,  # [slots] float32
    out_ptr,  # [slots, width], or where weighted [TOP_K, rows, width] float32
    parts_ptr,  # [SPLITS, slots, N] float32, added up here
    counters_ptr,  # [slots x tiles of lines] int32, zero before and after
    num_slots,
    num_rows,
    N,
    K,
    k_per_split,
    KIND: tl.constexpr,  # of codes: int4, e2m1, int8, e4m3
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    PIECES: tl.constexpr,  # of bytes, at a time
    BLOCK: tl.constexpr,  # words of 32 bits of a line at a time, or of a piece
    EVEN: tl.constexpr,  # of bytes, lines of a program have the same scales, and all pieces are there
    WAITS: tl.constexpr,  # not before the first weights that are bytes are asked for
    PDL: tl.constexpr,
):
    """Some lines of the expert of one slot."""
    if WAITS:
        allow_dependents(PDL)
    else:
        begin_dependent(PDL)
    tiles = tl.cdiv(N, LINES)
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert = tl.zeros([], tl.int64)
    if ids_ptr is not None:
        expert = tl.load(ids_ptr + slot).to(tl.int64)
    lines, outputs, width = lines_of(tile, N, LINES, ACTIVATION != "")
    inside = outputs < width
    line = expert * N + lines
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x = x_ptr + (slot // PER_ROW).to(tl.int64) * K
    begin = tl.multiple_of(tl.program_id(1) * k_per_split, CHUNK_COLUMNS)
    end = tl.minimum(begin + k_per_split, K)
    if KIND == "int8" or KIND == "e4m3":
        GATED: tl.constexpr = ACTIVATION != ""
        first_line = expert * N + tile * (LINES // 2 if GATED else LINES)
        out = _bytes_times_row(
            x, codes_ptr, scale_ptr, line, first_line, inside, begin, end, N, K,
            KIND, GROUP, LINES, PIECES, BLOCK, EVEN, GATED, WAITS,
        )  # fmt: skip
    else:
        out = _words_times_row(
            x, codes_ptr, scale_ptr, zero_ptr, line, inside, begin, end, K, KIND, GROUP, ASM, LINES, BLOCK
        )
    if SPLITS > 1:
        split_at = slot.to(tl.int64) * N + lines
        out, is_last = add_splits(out, parts_ptr, counters_ptr, num_slots * N, split_at, inside, SPLITS)
        if not is_last:
            return
    if line_scale_ptr is not None:
        out *= tl.load(line_scale_ptr + line, mask=inside, other=0.0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + line, mask=inside, other=0.0).to(tl.float32)
    place = slot
    if TOP_K > 0:
        out = out.to(kind).to(tl.float32) * tl.load(weights_ptr + slot)
        place = slot % TOP_K * num_rows + slot // TOP_K
    _put_line(out, tile, out_ptr + place.to(tl.int64) * width, width, kind, ACTIVATION, LINES)


def packed_rows(
    x: Tensor,
    expert_ids: Tensor | None,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str = "",
    weights: Tensor | None = None,
    *,
    per_row: int = 1,
    splits: int = 1,
    lines: int = 0,
    block: int = 64,
    num_warps: int = 4,
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], as `packed_tiles`; no fine weights.

    Without `expert_ids` there is one matrix, and every line of x is a slot. A program has `lines` of a matrix, and of
    4-bit weights `block` words of 32 bits of each at a time.
    """
    assert not weight.is_fine
    _, n, k = weight.sizes
    num_slots = x.shape[0] if expert_ids is None else expert_ids.numel()
    out = empty_slots(x, num_slots, n // 2 if activation else n, weights)
    codes, scales, zeros, _, line_scale = _parts(weight)
    assert codes is not None
    codes = weight.codes.view(torch.int32)
    columns, pieces = 8 * block, 1
    if weight.has_bytes:
        piece = 128 if weight.group % 128 == 0 else CHUNK
        pieces = (_FEW_BYTES if k <= 4 * _FEW_BYTES else 2 * _FEW_BYTES) // piece
        while pieces > 1 and k % (pieces * piece):
            pieces //= 2
        block, columns = piece // 4, pieces * piece
        lines = lines or (8 if columns > _FEW_BYTES else 16)
    lines = lines or 16
    # Then a thread has four words side by side, as `_fours` takes them.
    is_aligned = not (x.data_ptr() % 16 or codes.data_ptr() % 16) and lines * columns >= 512 * num_warps
    is_even = torch.cuda.is_available() and x.dtype == torch.bfloat16 and weight.scales.dtype == torch.float32
    is_even = is_even and is_aligned and weight.rows_per_scale % lines == 0 and n % lines == 0
    is_even = is_even and k % (splits * columns) == 0
    options = launch_options()
    parts, counters = out, out
    if splits > 1:
        parts = torch.empty(splits, num_slots, n, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    _packed_row_kernel[(num_slots * triton.cdiv(n, lines), splits)](
        x,
        codes,
        scales,
        zeros,
        line_scale,
        bias,
        expert_ids,
        out if weights is None else weights,
        out,
        parts,
        counters,
        num_slots,
        out.shape[1],
        n,
        k,
        triton.cdiv(triton.cdiv(k, splits), columns) * columns,
        KIND=_kind(weight),
        ACTIVATION=activation,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        GROUP=weight.group,
        ASM=torch.cuda.is_available(),
        SPLITS=splits,
        LINES=lines,
        PIECES=pieces,
        BLOCK=block,
        EVEN=is_even,
        WAITS=weight.has_bytes and expert_ids is None and options["PDL"],
        num_warps=num_warps,
        **options,
    )
    return out
