"""Grouped matmuls of many slots that lie sorted by expert: both sides come as copies by the tensor memory unit.

A tile of slots may reach into the next expert's lines; what it computes of them is not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.expert_slots import SortedSlots
from quire.kernels.triton.grouped_matmul import GroupedShape, gated
from quire.kernels.triton.launch import FUSED, has_large_tiles
from quire.kernels.triton.widen import rounded

_ALIGNMENT = 16  # bytes, of what the copies begin at


@triton.jit
def _sorted_kernel(
    x_lines,  # descriptor of x [slots, K], tiles of [BT, BK]; x [n, K] itself where its lines are gathered
    weight_lines,  # descriptor of the weights [experts * N, K], tiles of [BN, BK], or half of it where gated
    bias_ptr,
    out_ptr,  # [slots, width]
    order_ptr,
    tiles_ptr,
    num_tiles,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PER_ROW: tl.constexpr,  # slots that share a line of x, which is gathered; 0: lines of x are sorted slots
    EVEN: tl.constexpr,  # K is whole pieces of BK
    SCATTER: tl.constexpr,  # results stand where their slots do, else sorted
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    LINES: tl.constexpr = BN if ACTIVATION == "" else BN // 2
    width = N if ACTIVATION == "" else N // 2
    line_tiles = tl.cdiv(width, LINES)
    # Programs that run together share weights and lines of x: GROUP tiles of slots walk over the outputs together.
    first = tl.program_id(0) // (GROUP * line_tiles) * GROUP
    group = tl.minimum(num_tiles - first, GROUP)
    tile = first + tl.program_id(0) % (GROUP * line_tiles) % group
    line = tl.program_id(0) % (GROUP * line_tiles) // group * LINES
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    begin = tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    places = begin + tl.arange(0, BT)
    inside = places < end
    slots = tl.load(order_ptr + places, mask=inside, other=0)
    inner = tl.arange(0, BK)
    if PER_ROW > 0:
        x_at = x_lines + (slots // PER_ROW).to(tl.int64)[None, :] * K + inner[:, None]
    acc = tl.zeros([LINES, BT], tl.float32)
    if ACTIVATION != "":
        up = tl.zeros([LINES, BT], tl.float32)
    for start in range(0, K, BK):
        if PER_ROW == 0:
            x = x_lines.load([begin, start]).T
        elif EVEN:
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_at + start, mask=inside[None, :] & (start + inner < K)[:, None], other=0.0)
        acc = tl.dot(weight_lines.load([expert * N + line, start]), x, acc)
        if ACTIVATION != "":
            up = tl.dot(weight_lines.load([expert * N + width + line, start]), x, up)
    outputs = line + tl.arange(0, LINES)
    out_mask = outputs < width
    if HAS_BIAS:
        bias = bias_ptr + expert.to(tl.int64) * N + outputs
        acc += tl.load(bias, mask=out_mask, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION != "":
            up += tl.load(bias + width, mask=out_mask, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":  # of what the matmul alone would be, rounded
        kind = out_ptr.dtype.element_ty
        acc = gated(rounded(acc, kind), rounded(up, kind), ACTIVATION)
    if SCATTER:
        places = slots
    at = places.to(tl.int64)[:, None] * width + outputs[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=inside[:, None] & out_mask[None, :])


def grouped_sorted(
    x: Tensor,
    slots: SortedSlots,
    weight: Tensor,
    bias: Tensor | None,
    shape: GroupedShape,
    activation: str = "",
    *,
    per_row: int = 0,
    scatter: bool = False,
    group: int = 1,
) -> Tensor:
    """x [slots, K], sorted -> [slots, N], or N / 2 with an activation, sorted or where the slots stand.

    With `per_row` x is [slots / per_row, K], and slot s has line s // per_row of it.
    """
    experts, n, k = weight.shape
    assert slots.size == shape.bt
    width, lines = (n // 2, shape.bn // 2) if activation else (n, shape.bn)
    out = torch.empty(slots.order.shape[0], width, dtype=x.dtype, device=x.device)
    num_tiles = slots.tiles.shape[1]
    flat = weight.view(experts * n, k)
    _sorted_kernel[(num_tiles * triton.cdiv(width, lines),)](
        x if per_row else TensorDescriptor(x, list(x.shape), [k, 1], [shape.bt, shape.bk]),
        TensorDescriptor(flat, list(flat.shape), [k, 1], [lines, shape.bk]),
        weight if bias is None else bias,
        out,
        slots.order,
        slots.tiles,
        num_tiles,
        n,
        k,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        PER_ROW=per_row,
        EVEN=k % shape.bk == 0,
        SCATTER=scatter,
        GROUP=group,
        BT=shape.bt,
        BN=shape.bn,
        BK=shape.bk,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **FUSED,
    )
    return out


def sorted_fits(x: Tensor, *weights: Tensor) -> bool:
    """Whether there is such a unit, with room for what it copies, and it can copy both sides."""
    aligned = all(side.data_ptr() % _ALIGNMENT == 0 and side.shape[-1] % 8 == 0 for side in (x, *weights))
    return aligned and x.element_size() == 2 and has_large_tiles()
