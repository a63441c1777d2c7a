"""Matmuls of up to 8 tokens with 4-bit weights, every inner sum in the order that `packed_wide` has for any number.

As in `packed_fragments` a warp multiplies 16 lines by 8 tokens on registers. But a matrix instruction has 16 columns
side by side, in their order, and each warp a whole split of the inner sum: matrix units add the columns of one
instruction at once, so that which thread has which of them is all the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.packed import CHUNK, PackedWeight
from quire.kernels.triton.grouped_matmul import empty_slots
from quire.kernels.triton.launch import allow_dependents, launch_options, wait_for_predecessor
from quire.kernels.triton.packed_fragments import (
    MAX_TOKENS,
    appended,
    byte_at,
    half_values,
    plain,
    powers_at,
    put,
    scale_at,
    stay,
    unpacked,
)
from quire.kernels.triton.packed_matmul import _kind, _parts

_WARPS = 4  # of a program, unless there are more splits
_AHEAD = 6  # chunks that a warp reads while it multiplies as many
_AHEAD_OF_MANY = 4  # where there are enough warps: with fewer registers there can be more at once
_MANY_LINES = 16384


def _assembly(kind: str) -> str:
    """A chunk's matmul: $0-3 are the sums $20-23 of two lines, each for two tokens, and what 64 columns add to them.

    Of each line there are two words ($4-5, $6-7) and two zeros or powers ($16-17, $18-19), of x two words a slice.
    """
    sums = "{$0, $1, $2, $3}"
    lines = ["{", ".reg .b32 a<4>, part, sign;", *(f"mov.b32 ${index}, ${20 + index};" for index in range(4))]
    for piece in range(4):
        for operand in range(4):
            line, word = operand % 2, operand // 2
            lines += unpacked(kind, f"a{operand}", 4 + 2 * line + word, piece, 16 + 2 * line)
        x = f"{{${8 + 2 * piece}, ${9 + 2 * piece}}}"
        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {{a0, a1, a2, a3}}, {x}, {sums};")
    return "\n".join([*lines, "}"])


_INT4: tl.constexpr = tl.constexpr(_assembly("int4"))
_E2M1: tl.constexpr = tl.constexpr(_assembly("e2m1"))
_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 20))


@triton.jit
def _chunk_matmul(low, high, xs, zero, more, acc, upper, KIND: tl.constexpr, ASM: tl.constexpr, WARPS: tl.constexpr):
    """Sums of two lines of a thread [threads, 2 tokens] and what a chunk adds to them."""
    if ASM:
        CODE: tl.constexpr = _INT4 if KIND == "int4" else _E2M1
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
    first_half, second_half = tl.split(plain(zero))
    zeros = (first_half if SLICE < 2 else second_half)[:, None]
    first, second = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
    a, b = half_values(words, 4 * SLICE, zeros, KIND), half_values(words, 16 + 4 * SLICE, zeros, KIND)
    sums = tl.reshape(a, [WARPS, 8, 1, 8]) * tl.reshape(first, [WARPS, 1, 8, 8])
    sums += tl.reshape(b, [WARPS, 8, 1, 8]) * tl.reshape(second, [WARPS, 1, 8, 8])
    return tl.reshape(tl.sum(sums, axis=3), [32 * WARPS, 2])


@triton.jit
def _numbers_at(scale_ptr, zero_ptr, groups, chunk, i, KIND: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr):
    """The scale of a chunk of a line, and what is taken from or multiplied into its weights; see packed_fragments."""
    if KIND == "e2m1":
        zero = powers_at(scale_ptr, groups[:, None] + 2 * chunk[:, None] + i, ASM)
        scale = zero
    else:
        at = (groups + chunk * 64 // GROUP)[:, None] + i * 0
        scale = scale_at(scale_ptr, at, ASM)
        if zero_ptr is None:
            zero = tl.full(at.shape, 0x43084308, tl.int32)
        else:
            zero = byte_at(zero_ptr, (groups + chunk * 64 // GROUP)[:, None], ASM) * 0x00010001 + 0x43004300
            zero = tl.broadcast_to(zero, at.shape)
    return scale, zero


@triton.jit
def _read(
    first, last, i, low_at, high_at, scale_ptr, zero_ptr, groups, more_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, SUM: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros of two lines, of AHEAD chunks from `first` on."""
    lows, highs, scales, zeros, more_scales, more_zeros = (), (), (), (), (), ()
    for number in tl.static_range(AHEAD):
        chunk = first + number
        present = (chunk < last)[:, None]
        at = tl.multiple_of(8 * chunk, 8)[:, None]
        lows = appended(lows, tl.load(low_at + at, mask=present, other=0, eviction_policy="evict_first"))
        highs = appended(highs, tl.load(high_at + at, mask=present, other=0, eviction_policy="evict_first"))
        if number % SUM == 0:
            there = tl.where(chunk < last, chunk, 0)
            scale, zero = _numbers_at(scale_ptr, zero_ptr, groups, there, i, KIND, GROUP, ASM)
            scales, zeros = appended(scales, scale), appended(zeros, zero)
            scale, zero = _numbers_at(scale_ptr, zero_ptr, more_groups, there, i, KIND, GROUP, ASM)
            more_scales, more_zeros = appended(more_scales, scale), appended(more_zeros, zero)
    return lows, highs, scales, zeros, more_scales, more_zeros


@triton.jit
def _activations(x_at, first, last, AHEAD: tl.constexpr):
    """Four slices of each chunk."""
    xs = ()
    for number in tl.static_range(AHEAD):
        present = (first + number < last)[:, None]
        chunk_at = x_at + tl.multiple_of(32 * (first + number), 32)[:, None]
        for index in tl.static_range(4):
            xs = appended(xs, tl.load(chunk_at + 8 * index, mask=present, other=0))
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
def _fixed_fragment_kernel(
    x_ptr,  # words of two bfloat16
    codes_ptr,  # words of 32 bits
    scale_ptr,
    zero_ptr,
    line_scale_ptr,
    bias_ptr,
    ids_ptr,  # [slots] int32: the expert of each
    out_ptr,  # [slots, width]
    num_rows,
    N,
    K,
    chunks_per_split,
    KIND: tl.constexpr,  # of codes: int4, e2m1
    ACTIVATION: tl.constexpr,
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    SUM: tl.constexpr,  # chunks of int4 that are summed before they are scaled
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,  # of the inner sum, of a warp each
    TILES: tl.constexpr,  # of 16 lines, of SPLITS warps each
    AHEAD: tl.constexpr,  # chunks at a time, whole sums
    PDL: tl.constexpr,
):
    """Some lines, of one matrix for all rows of x, or of the expert of one slot."""
    allow_dependents(PDL)
    WARPS: tl.constexpr = SPLITS * TILES
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
    width = tl.multiple_of(K // 8, 8)
    low_at = codes_ptr + tl.multiple_of(line * width + 2 * quarter, 2)[:, None] + i
    high_at = codes_ptr + tl.multiple_of((line + apart) * width + 2 * quarter, 2)[:, None] + i
    x_at = x_ptr + tl.multiple_of(row.to(tl.int64) * (K // 2) + 2 * quarter, 2)[:, None] + i
    groups, more_groups = line * (K // GROUP), (line + apart) * (K // GROUP)
    begin = warp % SPLITS * chunks_per_split
    last = tl.minimum(begin + chunks_per_split, K // 64)
    none = thread * 0 + (N >> 30)
    read = _read(
        begin, last, i, low_at, high_at, scale_ptr, zero_ptr, groups, more_groups, KIND, GROUP, SUM, ASM, AHEAD
    )
    wait_for_predecessor(PDL)
    acc = tl.zeros([32 * WARPS, 2], tl.float32)
    upper = tl.zeros([32 * WARPS, 2], tl.float32)
    for first in range(0, chunks_per_split, AHEAD):
        # In this order for the reasons that packed_fragments has.
        xs = _activations(x_at, begin + first, last, AHEAD)
        stay(none, ASM)
        after = _read(
            begin + first + AHEAD, last, i, low_at, high_at, scale_ptr, zero_ptr, groups, more_groups,
            KIND, GROUP, SUM, ASM, AHEAD,
        )  # fmt: skip
        none = stay(none, ASM)
        lows, highs, scales, zeros, more_scales, more_zeros = read
        part, more = tl.zeros_like(acc), tl.zeros_like(upper)
        for number in tl.static_range(AHEAD):
            slices = (xs[4 * number], xs[4 * number + 1], xs[4 * number + 2], xs[4 * number + 3])
            zero, other = zeros[number // SUM] + none[:, None], more_zeros[number // SUM] + none[:, None]
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
    put(
        tl.reshape(out, [16 * TILES, 8]), tile, slot, expert, line_scale_ptr, bias_ptr, ids_ptr, out_ptr, out_ptr,
        num_rows, N, KIND, ACTIVATION, 0,
    )  # fmt: skip


def fixed_fits(*weights: PackedWeight) -> bool:
    """Whether the kernel takes weights that `packed_wide` takes."""
    types = (torch.float16, torch.bfloat16, torch.float32)
    return not any(
        weight.has_bytes or weight.sizes[1] % 2 or not (weight.is_float or weight.scales.dtype in types)
        for weight in weights
    )


def packed_fixed(
    x: Tensor,
    expert_ids: Tensor | None,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str = "",
    *,
    columns: int,
    per_row: int = 1,
    splits: int = 1,
    ahead: int | None = None,
) -> Tensor:
    """As `packed_fragments`; in the order of `packed_wide` with these splits and `columns` (its `shape.bk`)."""
    _, n, k = weight.sizes
    num_slots = x.shape[0] if expert_ids is None else expert_ids.numel()
    assert expert_ids is not None or num_slots <= MAX_TOKENS
    out = empty_slots(x, num_slots, n // 2 if activation else n, None)
    _, scales, zeros, _, line_scale = _parts(weight)
    bk = CHUNK if weight.is_float else min(columns, weight.group)
    tiles = max(1, _WARPS // splits)
    ahead = ahead or (_AHEAD_OF_MANY if n * splits > _MANY_LINES and not weight.is_float else _AHEAD)
    _fixed_fragment_kernel[(triton.cdiv(n, 16 * tiles) * (1 if expert_ids is None else num_slots),)](
        x.view(torch.int32),
        weight.codes.view(torch.int32),
        scales,
        zeros,
        line_scale,
        bias,
        expert_ids,
        out,
        num_slots,
        n,
        k,
        triton.cdiv(triton.cdiv(k, splits), bk) * (bk // CHUNK),
        KIND=_kind(weight),
        ACTIVATION=activation,
        PER_ROW=per_row,
        GROUP=weight.group,
        SUM=bk // CHUNK,
        ASM=torch.cuda.is_available(),
        SPLITS=splits,
        TILES=tiles,
        AHEAD=ahead,
        num_warps=splits * tiles,
        **launch_options(),
    )
    return out
