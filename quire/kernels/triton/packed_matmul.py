"""Matmuls with quantized weights, which are unpacked in the kernel: of experts, and of one matrix.

Weights lie as quire/kernels/packed.py says, so that both halves of a piece are read with activations side by side.
Sums of a piece are scaled; where that is too coarse (`FINE`), weights are, and rounded to the type of activations.
The inner sum of a slot runs in one order, whatever the shape of the tiles, if their `bk` is the same.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.packed import CHUNK, E4M3, PackedWeight
from quire.kernels.triton.expert_slots import SortedSlots
from quire.kernels.triton.grouped_matmul import GroupedShape, activated, empty_slots, weighted
from quire.kernels.triton.launch import HOPPER, begin_dependent, launch_options, stages_within
from quire.kernels.triton.matmul import arrival_counters
from quire.kernels.triton.packed_values import (
    fine_bytes,
    fine_slice,
    fine_slices,
    float_slices,
    power_of,
    scale_of,
    slice_of,
    slices_of,
    zero_of,
)
from quire.kernels.triton.tile_matmul import add_splits, lines_of
from quire.kernels.triton.widen import byte_values

_UNPACKED_CHUNKS = 64  # of a program


@triton.jit
def _slots_of(tile, order_ptr, tiles_ptr, num_slots, num_tiles, GROUPED: tl.constexpr, BT: tl.constexpr):
    """The expert of a tile (-1: there is none), its slots, and which of them there are."""
    if GROUPED:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        places = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BT)
        inside = places < tl.load(tiles_ptr + 2 * num_tiles + tile)
        return expert, tl.load(order_ptr + places, mask=inside, other=0), inside
    slots = tile * BT + tl.arange(0, BT)
    return tl.zeros([], tl.int64), slots, slots < num_slots


@triton.jit
def _add_bytes(
    acc,
    x_line,  # [1, slots]: where the lines of activations begin
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    line,
    line_mask,
    inside,
    begin,
    end,
    K,
    KIND: tl.constexpr,
    FINE: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    kind: tl.constexpr,
):
    """acc [lines, slots] plus the sums over columns from begin to end, of weights that are bytes."""
    groups = line * (K // GROUP)
    columns = tl.arange(0, BK)
    x_at = x_line + columns[:, None]
    codes_at = codes_ptr + line[:, None] * K + columns[None, :]
    for start in range(begin, end, BK):
        codes = tl.load(codes_at + start, mask=line_mask[:, None], other=0)
        x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        if FINE:
            at = groups + start // GROUP
            values = fine_bytes(codes, scale_ptr, minimum_ptr, at, line_mask, KIND, BN, BK, GROUP)
            acc = tl.dot(values.to(kind), x, acc, input_precision="ieee")
        else:
            values = byte_values(codes, kind, KIND)
            scale = scale_of(scale_ptr, groups + start // GROUP, line_mask)
            acc += tl.dot(values, x, input_precision="ieee") * scale[:, None]
    return acc


@triton.jit
def _add_words(
    acc,
    x_line,  # [1, slots]: where the lines of activations begin
    codes_ptr,
    scale_ptr,
    zero_ptr,
    minimum_ptr,
    line,
    line_mask,
    inside,
    begin,
    end,
    K,
    KIND: tl.constexpr,
    FINE: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    kind: tl.constexpr,
):
    """The same, of weights of 4 bits in words."""
    groups = line * (K // GROUP)
    WORDS: tl.constexpr = BK // 4
    POWERS: tl.constexpr = ASM and scale_ptr.dtype.element_ty == tl.int8 and GROUP == 32 and BK == 64
    word = tl.arange(0, WORDS)
    x_at = x_line + (word // 16 * 64 + word % 16)[:, None]
    codes_at = codes_ptr + line[:, None] * (K // 4) + word[None, :]
    for start in range(begin, end, BK):  # K is whole pieces
        words = tl.load(codes_at + start // 4, mask=line_mask[:, None], other=0)
        x0 = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        x1 = tl.load(x_at + start + 16, mask=inside[None, :], other=0.0)
        x2 = tl.load(x_at + start + 32, mask=inside[None, :], other=0.0)
        x3 = tl.load(x_at + start + 48, mask=inside[None, :], other=0.0)
        at = groups + start // GROUP
        if FINE:
            w0, w1, w2, w3 = fine_slices(
                words, scale_ptr, minimum_ptr, groups, start, line_mask, kind, KIND, BN, WORDS, GROUP
            )
        elif POWERS:
            low = power_of(scale_ptr, at, line_mask, BN, WORDS)
            w0, w1, w2, w3 = float_slices(words, low, power_of(scale_ptr, at + 1, line_mask, BN, WORDS))
        else:
            low = zero_of(zero_ptr, at, line_mask, BN, WORDS)
            high = zero_of(zero_ptr, at + 1, line_mask, BN, WORDS) if GROUP == 32 else low
            w0, w1, w2, w3 = slices_of(words, low, high, kind, KIND == "e2m1", ASM, BN, WORDS)
        if FINE or POWERS:
            acc = tl.dot(w0, x0, acc, input_precision="ieee")
            acc = tl.dot(w1, x1, acc, input_precision="ieee")
            acc = tl.dot(w2, x2, acc, input_precision="ieee")
            acc = tl.dot(w3, x3, acc, input_precision="ieee")
        else:
            part = tl.dot(w0, x0, input_precision="ieee")
            part = tl.dot(w1, x1, part, input_precision="ieee")
            scale = scale_of(scale_ptr, at, line_mask)
            if GROUP == 32:
                acc += part * scale[:, None]
                scale = scale_of(scale_ptr, at + 1, line_mask)
                part = tl.dot(w2, x2, input_precision="ieee")
            else:
                part = tl.dot(w2, x2, part, input_precision="ieee")
            part = tl.dot(w3, x3, part, input_precision="ieee")
            acc += part * scale[:, None]
    if POWERS:
        acc *= 9223372036854775808.0  # 2 ** 63
    return acc


@triton.jit
def _packed_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    minimum_ptr,
    line_scale_ptr,
    bias_ptr,
    out_ptr,  # [slots, width], or where weighted [TOP_K, rows, width] float32
    weights_ptr,  # [slots] float32
    order_ptr,
    tiles_ptr,  # [3, tiles]
    parts_ptr,  # [SPLITS, slots, N] float32, added up here
    counters_ptr,  # [tiles of slots and lines] int32, zero before and after
    num_slots,
    num_tiles,
    num_rows,
    N,
    K,
    k_per_split,
    KIND: tl.constexpr,  # of codes: int4, e2m1, int8, e4m3
    FINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,  # slots are sorted into tiles; else slot s is line s of x and there is one matrix
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,  # unless FINE, at most GROUP; where that is 32, each half of a chunk has its own scale
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line_tiles = tl.cdiv(N, BN)
    tile, line_tile = tl.program_id(0) // line_tiles, tl.program_id(0) % line_tiles
    expert, slots, inside = _slots_of(tile, order_ptr, tiles_ptr, num_slots, num_tiles, GROUPED, BT)
    if expert < 0:
        return
    lines, outputs, width = lines_of(line_tile, N, BN, ACTIVATION != "")
    line_mask = outputs < width
    begin = tl.program_id(1) * k_per_split
    end = tl.minimum(begin + k_per_split, K)
    line = expert * N + lines
    x_line = x_ptr + (slots // PER_ROW).to(tl.int64)[None, :] * K
    kind: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BN, BT], tl.float32)
    if KIND == "int8" or KIND == "e4m3":
        acc = _add_bytes(
            acc, x_line, codes_ptr, scale_ptr, minimum_ptr, line, line_mask, inside, begin, end, K,
            KIND, FINE, GROUP, BN, BK, kind,
        )  # fmt: skip
    else:
        acc = _add_words(
            acc, x_line, codes_ptr, scale_ptr, zero_ptr, minimum_ptr, line, line_mask, inside, begin, end, K,
            KIND, FINE, GROUP, ASM, BN, BK, kind,
        )  # fmt: skip
    if SPLITS > 1:
        split_at = slots.to(tl.int64)[None, :] * N + lines[:, None]
        mask = inside[None, :] & line_mask[:, None]
        acc, is_last = add_splits(acc, parts_ptr, counters_ptr, num_slots * N, split_at, mask, SPLITS)
        if not is_last:
            return
    if line_scale_ptr is not None:
        acc *= tl.load(line_scale_ptr + line, mask=line_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + lines, mask=line_mask, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        acc = activated(acc, out_ptr.dtype.element_ty, BN, BT, ACTIVATION)
        outputs = line_tile * (BN // 2) + tl.arange(0, BN // 2)
    if TOP_K > 0:
        acc = weighted(acc, weights_ptr, slots, inside, x_ptr.dtype.element_ty)
        slots = slots % TOP_K * num_rows + slots // TOP_K
    at = slots.to(tl.int64)[:, None] * width + outputs[None, :]
    mask = inside[:, None] & (outputs < width)[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_kernel(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    minimum_ptr,
    line_scale_ptr,
    out_ptr,  # [N, K]
    num_chunks,  # of all lines
    K,
    KIND: tl.constexpr,
    FINE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Chunks that lie side by side, in the type of the result; what a program reads and writes is contiguous."""
    begin_dependent(PDL)
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    mask = chunk < num_chunks
    line = chunk // (K // 64)
    start = (chunk - line * (K // 64)) * 64
    groups = line * (K // GROUP) + start // GROUP
    line_scale = tl.full([CHUNKS, 1], 1.0, tl.float32)
    if line_scale_ptr is not None:
        line_scale = tl.load(line_scale_ptr + line, mask=mask, other=0.0)[:, None]
    if KIND == "int8" or KIND == "e4m3":
        column = tl.arange(0, 64)
        codes = tl.load(codes_ptr + chunk[:, None] * 64 + column[None, :], mask=mask[:, None], other=0)
        values = fine_bytes(codes, scale_ptr, minimum_ptr, groups, mask, KIND, CHUNKS, 64, GROUP)
        at = out_ptr + chunk[:, None] * 64 + column[None, :]
        tl.store(at, (values * line_scale).to(out_ptr.dtype.element_ty), mask=mask[:, None])
    else:
        word = tl.arange(0, 16)
        words = tl.load(codes_ptr + chunk[:, None] * 16 + word[None, :], mask=mask[:, None], other=0)
        for index in tl.static_range(4):
            if FINE:
                values = fine_slice(words, scale_ptr, minimum_ptr, groups, 0, mask, index, KIND, CHUNKS, 16, GROUP)
            else:
                group = groups + 16 * index // GROUP
                values = slice_of(words, zero_of(zero_ptr, group, mask, CHUNKS, 16), index, KIND == "e2m1")
                values *= scale_of(scale_ptr, group, mask)[:, None]
            at = out_ptr + chunk[:, None] * 64 + 16 * index + word[None, :]
            tl.store(at, (values * line_scale).to(out_ptr.dtype.element_ty), mask=mask[:, None])


def _parts(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """What kernels read of a weight: codes of 4 bits as words, 8-bit floats as bytes, exponents with a sign."""
    codes = weight.codes.view({E4M3: torch.uint8, torch.uint8: torch.int16}.get(weight.codes.dtype, torch.int8))
    viewed = {E4M3: torch.uint8, torch.uint8: torch.int8}.get(weight.scales.dtype)
    scales = weight.scales if viewed is None else weight.scales.view(viewed)
    return codes, scales, weight.zeros, weight.minima, weight.line_scale


def _kind(weight: PackedWeight) -> str:
    if weight.has_bytes:
        return "int8" if weight.codes.dtype == torch.int8 else "e4m3"
    return "e2m1" if weight.is_float else "int4"


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The values [experts * N, K]."""
    experts, n, k = weight.sizes
    n *= experts
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    num_chunks = n * k // CHUNK
    _unpack_kernel[(triton.cdiv(num_chunks, _UNPACKED_CHUNKS),)](
        *_parts(weight),
        out,
        num_chunks,
        k,
        KIND=_kind(weight),
        FINE=weight.is_fine,
        GROUP=weight.group,
        CHUNKS=_UNPACKED_CHUNKS,
        num_warps=4,
        **launch_options(fused=False),
    )
    return out


def piece(weight: PackedWeight, wanted: int) -> int:
    """Columns at a time: whole chunks within one scale, or one chunk where each half has its own."""
    if weight.is_fine:
        uneven = weight.sizes[2] % wanted or (weight.group > CHUNK and weight.group % wanted)
        return CHUNK if uneven else wanted
    columns = min(wanted, max(CHUNK, weight.group))
    while weight.group > 32 and weight.group % columns:
        columns -= CHUNK
    return columns


@cache
def has_packed_arithmetic() -> bool:
    """Whether pairs of bfloat16 are computed at once."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER


def packed_tiles(
    x: Tensor,
    slots: SortedSlots | None,
    weight: PackedWeight,
    bias: Tensor | None,
    per_row: int,
    shape: GroupedShape,
    activation: str = "",
    weights: Tensor | None = None,
    splits: int = 1,
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], or N / 2 with an activation.

    Without `slots` there is one matrix, and every line of x is a slot. With `weights` [n, k] the result of each slot
    is weighted: [k, n, N] float32. Of what `packed_tiles` is given, only `splits` of the inner sum, which the last
    program of a tile adds up, `shape.bk` and whether there are four warps or fewer can change a bit of the result.
    """
    _, n, k = weight.sizes
    bk = piece(weight, shape.bk)
    assert k % bk == 0
    num_slots = x.shape[0] if slots is None else slots.order.shape[0]
    out = empty_slots(x, num_slots, n // 2 if activation else n, weights)
    num_tiles = triton.cdiv(num_slots, shape.bt) if slots is None else slots.tiles.shape[1]
    order, tiles = (out, out) if slots is None else (slots.order, slots.tiles)
    line_tiles = triton.cdiv(n, shape.bn)
    parts, counters = out, out
    if splits > 1:
        parts = torch.empty(splits, num_slots, n, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    _packed_kernel[(num_tiles * line_tiles, splits)](
        x,
        *_parts(weight),
        bias,
        out,
        out if weights is None else weights,
        order,
        tiles,
        parts,
        counters,
        num_slots,
        num_tiles,
        out.shape[1],
        n,
        k,
        triton.cdiv(triton.cdiv(k, splits), bk) * bk,
        KIND=_kind(weight),
        FINE=weight.is_fine,
        GROUP=weight.group,
        ACTIVATION=activation,
        GROUPED=slots is not None,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        ASM=x.dtype == torch.bfloat16 and has_packed_arithmetic(),
        SPLITS=splits,
        BT=shape.bt,
        BN=shape.bn,
        BK=bk,
        num_warps=shape.num_warps,
        num_stages=stages_within(
            shape.num_stages, (shape.bt * x.element_size() + shape.bn * (1 + weight.has_bytes)) * bk
        ),
        **launch_options(),
    )
    return out
