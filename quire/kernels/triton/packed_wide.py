"""Matmuls with 4-bit weights for some tokens and more: both sides are copied by the tensor memory unit.

Weights are unpacked in registers and are the left operand; all columns of a piece go into one matrix multiplication.
Slots of experts lie sorted, so that a tile's are lines side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.packed import PackedWeight
from quire.kernels.triton.expert_slots import SortedSlots
from quire.kernels.triton.grouped_matmul import GroupedShape, empty_slots, gated, weighted
from quire.kernels.triton.launch import begin_dependent, launch_options, stages_within
from quire.kernels.triton.matmul import arrival_counters
from quire.kernels.triton.packed_matmul import _kind, _parts, has_packed_arithmetic
from quire.kernels.triton.packed_values import float_slices, slice_of, slices_of
from quire.kernels.triton.tile_matmul import add_splits


@triton.jit
def _spread_words(grid, LINES: tl.constexpr, CHUNKS: tl.constexpr):
    """A number for each chunk of 64 columns -> one for each of its words."""
    return tl.reshape(tl.broadcast_to(grid[:, :, None], [LINES, CHUNKS, 16]), [LINES, CHUNKS * 16])


@triton.jit
def _side_by_side(w0, w1, w2, w3, LINES: tl.constexpr, CHUNKS: tl.constexpr):
    """Slices [LINES, words] -> the columns in their order."""
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    joined = tl.permute(tl.reshape(joined, [LINES, CHUNKS, 16, 4]), (0, 1, 3, 2))
    return tl.reshape(joined, [LINES, CHUNKS * 64])


@triton.jit
def _scales_at(
    scale_ptr, zero_ptr, groups, start, end, mask, KIND: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr
):
    """What is stored for a piece: scales and zero points [lines], or exponents of both halves of chunks."""
    if KIND == "e2m1":
        at = start // 32 + 2 * tl.arange(0, CHUNKS)
        there = mask[:, None] & (at < end // 32)[None, :]
        both = scale_ptr + groups[:, None] + at[None, :]
        return tl.load(both, mask=there, other=0), tl.load(both + 1, mask=there, other=0)
    at = groups + start // GROUP
    there = mask & (start + tl.zeros_like(groups) < end)
    scale = tl.load(scale_ptr + at, mask=there, other=0)
    return scale, scale if zero_ptr is None else tl.load(zero_ptr + at, mask=there, other=0)


@triton.jit
def _floats_of(words, low, high, kind: tl.constexpr, ASM: tl.constexpr, LINES: tl.constexpr, CHUNKS: tl.constexpr):
    """Words of E2M1 and the exponents of their scales -> the columns in their order; if ASM, 2 ** -63 of them."""
    if ASM:
        low = (((low.to(tl.int16) & 255) + 63) << 7).to(tl.bfloat16, bitcast=True)
        high = (((high.to(tl.int16) & 255) + 63) << 7).to(tl.bfloat16, bitcast=True)
        w0, w1, w2, w3 = float_slices(
            words, _spread_words(low, LINES, CHUNKS), _spread_words(high, LINES, CHUNKS)
        )
    else:
        low = _spread_words(((low.to(tl.int32) & 255) << 23).to(tl.float32, bitcast=True), LINES, CHUNKS)
        high = _spread_words(((high.to(tl.int32) & 255) << 23).to(tl.float32, bitcast=True), LINES, CHUNKS)
        w0, w1 = (slice_of(words, low, 0, True) * low).to(kind), (slice_of(words, low, 1, True) * low).to(kind)
        w2, w3 = (slice_of(words, low, 2, True) * high).to(kind), (slice_of(words, low, 3, True) * high).to(kind)
    return _side_by_side(w0, w1, w2, w3, LINES, CHUNKS)


@triton.jit
def _packed_wide_kernel(
    x_tiles,  # descriptor of x [slots, K], tiles of [BT, BK]
    word_tiles,  # descriptor of codes [experts * PARTS, N / PARTS, K / 4], tiles of [PARTS, BN / PARTS, BK / 4]
    scale_ptr,
    zero_ptr,
    line_scale_ptr,
    bias_ptr,
    out_ptr,  # [slots, width], or where weighted [TOP_K, rows, width] float32
    weights_ptr,  # [slots] float32
    order_ptr,
    tiles_ptr,  # [3, tiles]
    parts_ptr,  # [SPLITS, slots, N] float32, added up here
    counters_ptr,
    num_slots,
    num_tiles,
    num_rows,
    N,
    K,
    k_per_split,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION == "" else 2
    EACH: tl.constexpr = BN // PARTS
    CHUNKS: tl.constexpr = BK // 64
    WORDS: tl.constexpr = BK // 4
    kind: tl.constexpr = x_tiles.dtype
    width = N // PARTS
    line_tiles = tl.cdiv(width, EACH)
    tile, line_tile = tl.program_id(0) // line_tiles, tl.program_id(0) % line_tiles
    if GROUPED:
        expert = tl.load(tiles_ptr + tile)
        if expert < 0:
            return
        first_slot = tl.load(tiles_ptr + num_tiles + tile)
        last_slot = tl.load(tiles_ptr + 2 * num_tiles + tile)
    else:
        expert = 0
        first_slot = tile * BT
        last_slot = num_slots
    place = first_slot + tl.arange(0, BT)
    inside = place < last_slot
    index = tl.arange(0, BN)
    outputs = line_tile * EACH + index % EACH
    lines = outputs + index // EACH * width
    line_mask = outputs < width
    line = (expert * N + lines).to(tl.int64)
    groups = line * (K // GROUP)
    begin = tl.program_id(1) * k_per_split
    end = tl.minimum(begin + k_per_split, K)
    acc = tl.zeros([BN, BT], tl.float32)
    # Scales are asked for one piece ahead: they come by no copy of their own.
    first, second = _scales_at(scale_ptr, zero_ptr, groups, begin, end, line_mask, KIND, GROUP, CHUNKS)
    for start in range(begin, end, BK):
        words = word_tiles.load([expert * PARTS, line_tile * EACH, start // 4]).reshape([BN, WORDS])
        x = x_tiles.load([first_slot, start])
        next_first, next_second = _scales_at(
            scale_ptr, zero_ptr, groups, start + BK, end, line_mask, KIND, GROUP, CHUNKS
        )
        if KIND == "e2m1":
            w = _floats_of(words, first, second, kind, ASM, BN, CHUNKS)
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            zero = tl.full([BN, WORDS], 136.0, tl.bfloat16)
            if zero_ptr is not None:
                zero = tl.broadcast_to((second.to(tl.float32) + 128.0).to(tl.bfloat16)[:, None], [BN, WORDS])
            w0, w1, w2, w3 = slices_of(words, zero, zero, kind, False, ASM, BN, WORDS)
            part = tl.dot(_side_by_side(w0, w1, w2, w3, BN, CHUNKS), x.T, input_precision="ieee")
            acc += part * first.to(tl.float32)[:, None]
        first, second = next_first, next_second
    if KIND == "e2m1" and ASM:
        acc *= 9223372036854775808.0  # 2 ** 63
    slots = place
    if SPLITS > 1:
        split_at = place.to(tl.int64)[None, :] * N + lines[:, None]
        mask = inside[None, :] & line_mask[:, None]
        acc, is_last = add_splits(acc, parts_ptr, counters_ptr, num_slots * N, split_at, mask, SPLITS)
        if not is_last:
            return
    if line_scale_ptr is not None:
        acc *= tl.load(line_scale_ptr + line, mask=line_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + line, mask=line_mask, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        rounded = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(rounded, [2, EACH, BT]), (1, 2, 0)))
        acc = gated(gate, up, ACTIVATION)
        outputs = line_tile * EACH + tl.arange(0, EACH)
    if TOP_K > 0:
        slots = tl.load(order_ptr + place, mask=inside, other=0)
        acc = weighted(acc, weights_ptr, slots, inside, kind)
        slots = slots % TOP_K * num_rows + slots // TOP_K
    at = slots.to(tl.int64)[:, None] * width + outputs[None, :]
    mask = inside[:, None] & (outputs < width)[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


def packed_wide(
    x: Tensor,
    slots: SortedSlots | None,
    weight: PackedWeight,
    bias: Tensor | None,
    shape: GroupedShape,
    activation: str = "",
    weights: Tensor | None = None,
    splits: int = 1,
) -> Tensor:
    """x [slots, K], sorted if there are `slots`, times the matrices of their experts -> [slots, N], as sorted as x.

    With an activation half as wide; with `weights` [n, k], weighted and in the order of tokens: [k, n, N] float32.
    """
    experts, n, k = weight.sizes
    num_slots = x.shape[0]
    halves = 2 if activation else 1
    out = empty_slots(x, num_slots, n // halves, weights)
    num_tiles = triton.cdiv(num_slots, shape.bt) if slots is None else slots.tiles.shape[1]
    order, tiles = (out, out) if slots is None else (slots.order, slots.tiles)
    codes, scales, zeros, _, line_scale = _parts(weight)
    assert codes is not None
    codes = codes.view(experts * halves, n // halves, k // 4)
    parts, counters = out, out
    if splits > 1:
        parts = torch.empty(splits, num_slots, n, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    bk = shape.bk
    _packed_wide_kernel[(num_tiles * triton.cdiv(n, shape.bn), splits)](
        TensorDescriptor(x, list(x.shape), [k, 1], [shape.bt, bk]),
        TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [halves, shape.bn // halves, bk // 4]),
        scales,
        zeros,
        line_scale,
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
        ACTIVATION=activation,
        GROUPED=slots is not None,
        TOP_K=0 if weights is None else weights.shape[1],
        GROUP=weight.group,
        ASM=x.dtype == torch.bfloat16 and has_packed_arithmetic(),
        SPLITS=splits,
        BT=shape.bt,
        BN=shape.bn,
        BK=bk,
        num_warps=shape.num_warps,
        num_stages=stages_within(shape.num_stages, (shape.bt * 2 + shape.bn // 2) * bk, 4096),
        **launch_options(),
    )
    return out
