"""Grouped matmuls of experts: tiles of outputs x slots, each tile with the matrix of its own expert.

Weights are [experts, out_features, in_features] and the left operand, as in `tile_matmul`. The inner sum of a slot
runs in one order, whoever else has the same expert: its result never depends on the other tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import gate_times_up
from quire.kernels.triton.expert_slots import SortedSlots
from quire.kernels.triton.launch import begin_dependent, launch_options, stages_within
from quire.kernels.triton.tile_matmul import lines_of


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """An activation of `gate`, times `up`; all float32."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    return gate_times_up(gate, up, ACTIVATION == "gelu_tanh")


@triton.jit
def activated(acc, OUT: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, ACTIVATION: tl.constexpr):
    """acc [LINES, SLOTS], gates and what they gate taking turns, rounded to OUT -> [LINES / 2, SLOTS]."""
    rounded = acc.to(OUT).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(rounded, [LINES // 2, 2, SLOTS]), (0, 2, 1)))
    return gated(gate, up, ACTIVATION)


@triton.jit
def weighted(acc, weights_ptr, slots, inside, kind: tl.constexpr):
    """acc [lines, slots], rounded to `kind`, times the weights of its slots; float32."""
    weights = tl.load(weights_ptr + slots, mask=inside, other=0.0)
    return acc.to(kind).to(tl.float32) * weights[None, :]


@triton.jit
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,  # [slots, width], or where weighted [TOP_K, rows, width] float32
    weights_ptr,  # [slots] float32
    order_ptr,
    tiles_ptr,  # [3, tiles]
    num_tiles,
    num_rows,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gated lines; "": none
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    PER_ROW: tl.constexpr,  # slots that share a line of x
    EVEN: tl.constexpr,  # K is whole pieces of BK
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line_tiles = tl.cdiv(N, BN)
    tile, line_tile = tl.program_id(0) // line_tiles, tl.program_id(0) % line_tiles
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BT)
    inside = places < tl.load(tiles_ptr + 2 * num_tiles + tile)
    slots = tl.load(order_ptr + places, mask=inside, other=0)
    lines, outputs, width = lines_of(line_tile, N, BN, ACTIVATION != "")
    line_mask = outputs < width
    inner = tl.arange(0, BK)
    w_at = weight_ptr + (expert * N + lines)[:, None] * K + inner[None, :]
    x_at = x_ptr + (slots // PER_ROW).to(tl.int64)[None, :] * K + inner[:, None]
    acc = tl.zeros([BN, BT], tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            w = tl.load(w_at, mask=line_mask[:, None], other=0.0)
            x = tl.load(x_at, mask=inside[None, :], other=0.0)
        else:
            present = start + inner < K
            w = tl.load(w_at, mask=line_mask[:, None] & present[None, :], other=0.0)
            x = tl.load(x_at, mask=inside[None, :] & present[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_at += BK
        x_at += BK
    if HAS_BIAS:
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
def _row_times_lines(x_ptr, weight_ptr, lines, inside, K, LINES: tl.constexpr, COLS: tl.constexpr):
    """One row of x times some lines of a weight, all K elements long: [LINES] float32."""
    inner = tl.arange(0, COLS)
    w_at = weight_ptr + lines.to(tl.int64)[:, None] * K + inner[None, :]
    acc = tl.zeros([LINES, COLS], tl.float32)
    for start in range(0, K, COLS):
        present = start + inner < K
        x = tl.load(x_ptr + start + inner, mask=present, other=0.0).to(tl.float32)
        w = tl.load(w_at + start, mask=inside[:, None] & present[None, :], other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * x[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def _put_line(out, tile, at, width, kind: tl.constexpr, ACTIVATION: tl.constexpr, LINES: tl.constexpr):
    """Store what a tile of lines gives at `at` [width], after the activation, which takes lines rounded to `kind`."""
    if ACTIVATION != "":
        out = tl.reshape(activated(out[:, None], kind, LINES, 1, ACTIVATION), [LINES // 2])
        outputs = tile * (LINES // 2) + tl.arange(0, LINES // 2)
    else:
        outputs = tile * LINES + tl.arange(0, LINES)
    tl.store(at + outputs, out.to(at.dtype.element_ty), mask=outputs < width)


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    shared_x_ptr,  # [rows, shared_k]
    shared_weight_ptr,  # [shared_n, shared_k]
    shared_out_ptr,  # a line for each row
    num_slots,
    num_rows,
    N,
    K,
    shared_n,
    shared_k,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    PER_ROW: tl.constexpr,
    SHARED: tl.constexpr,  # a row's shared expert has as many lines as this many of its slots; 0: there is none
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for few slots, a program for some lines of each: multiply and add over long contiguous pieces."""
    begin_dependent(PDL)
    tile, slot = tl.program_id(0), tl.program_id(1)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    if SHARED > 0:  # noqa: SIM102  known when it is compiled
        if slot >= num_slots:
            row, tile = (slot - num_slots) // SHARED, tile + (slot - num_slots) % SHARED * tl.num_programs(0)
            lines, outputs, width = lines_of(tile, shared_n, LINES, ACTIVATION != "")
            x = shared_x_ptr + row * shared_k
            out = _row_times_lines(x, shared_weight_ptr, lines, outputs < width, shared_k, LINES, COLS)
            _put_line(out.to(kind).to(tl.float32), tile, shared_out_ptr + row * width, width, kind, ACTIVATION, LINES)
            return
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    lines, outputs, width = lines_of(tile, N, LINES, ACTIVATION != "")
    inside = outputs < width
    out = _row_times_lines(x_ptr + slot // PER_ROW * K, weight_ptr + expert * N * K, lines, inside, K, LINES, COLS)
    if HAS_BIAS:
        out += tl.load(bias_ptr + expert * N + lines, mask=inside, other=0.0).to(tl.float32)
    place = slot
    if TOP_K > 0:
        out = out.to(kind).to(tl.float32) * tl.load(weights_ptr + slot)
        place = slot % TOP_K * num_rows + slot // TOP_K
    _put_line(out, tile, out_ptr + place * width, width, kind, ACTIVATION, LINES)


@triton.jit
def _add_slots_kernel(
    y_ptr, weights_ptr, out_ptr, WIDTH, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [n, width]: the slots of y [n, SLOTS, width] times their weights, added from the first to the last."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        y = tl.load(y_ptr + (row * SLOTS + slot) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        weighted = y * tl.load(weights_ptr + row * SLOTS + slot)
        total = weighted if slot == 0 else total + weighted
    tl.store(out_ptr + row * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class GroupedShape:
    """How a grouped matmul is cut; no bit of the result depends on it."""

    bt: int = 16  # slots of a tile
    bn: int = 64  # lines of the weight in a tile
    bk: int = 128  # of the inner dimension at a time
    num_warps: int = 4
    num_stages: int = 4  # if there is room for them


def grouped_tiles(
    x: Tensor,
    slots: SortedSlots,
    weight: Tensor,
    bias: Tensor | None,
    per_row: int,
    shape: GroupedShape,
    activation: str = "",
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], or N / 2 with an activation.

    With `weights` [n, k] the result of each slot is weighted: [k, n, N] float32.
    """
    _, n, k = weight.shape
    assert slots.size == shape.bt
    if out is None:
        out = empty_slots(x, slots.order.shape[0], n // 2 if activation else n, weights)
    num_tiles = slots.tiles.shape[1]
    _grouped_kernel[(num_tiles * triton.cdiv(n, shape.bn),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        out if weights is None else weights,
        slots.order,
        slots.tiles,
        num_tiles,
        out.shape[1],
        n,
        k,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        EVEN=k % shape.bk == 0,
        BT=shape.bt,
        BN=shape.bn,
        BK=shape.bk,
        num_warps=shape.num_warps,
        num_stages=stages_within(shape.num_stages, (shape.bt + shape.bn) * shape.bk * x.element_size()),
        **launch_options(),
    )
    return out


@dataclass(frozen=True)
class SharedLines:
    """What `grouped_one_row` computes beside the experts: a matrix that multiplies every row."""

    x: Tensor  # [n, k]
    weight: Tensor  # [lines, k]
    out: Tensor  # [n, lines], or half as many with an activation


def grouped_one_row(
    x: Tensor,
    expert_ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    per_row: int,
    activation: str = "",
    lines: int = 8,
    cols: int = 512,
    num_warps: int = 4,
    weights: Tensor | None = None,
    out: Tensor | None = None,
    shared: SharedLines | None = None,
) -> Tensor:
    """The same for few slots."""
    _, n, k = weight.shape
    num_slots = expert_ids.numel()
    if out is None:
        out = empty_slots(x, num_slots, n // 2 if activation else n, weights)
    beside = shared or SharedLines(x, weight[0], out)
    per_slot = 0 if shared is None else triton.cdiv(shared.weight.shape[0], n)
    _one_row_kernel[(triton.cdiv(n, lines), num_slots + per_slot * expert_ids.shape[0])](
        x,
        weight,
        weight if bias is None else bias,
        expert_ids,
        out if weights is None else weights,
        out,
        beside.x,
        beside.weight,
        beside.out,
        num_slots,
        expert_ids.shape[0],
        n,
        k,
        *beside.weight.shape,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        SHARED=per_slot,
        LINES=lines,
        COLS=cols,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


def empty_slots(x: Tensor, num_slots: int, width: int, weights: Tensor | None) -> Tensor:
    """Where the results of slots go: [slots, width], or weighted [k, n, width] float32."""
    if weights is None:
        return torch.empty(num_slots, width, dtype=x.dtype, device=x.device)
    return torch.empty(weights.shape[1], weights.shape[0], width, dtype=torch.float32, device=x.device)


def add_slots(y: Tensor, weights: Tensor) -> Tensor:
    """y [n, k, width], weights [n, k] float32 -> [n, width]."""
    n, k, width = y.shape
    out = torch.empty(n, width, dtype=y.dtype, device=y.device)
    block = min(1024, int(triton.next_power_of_2(width)))
    _add_slots_kernel[(n, triton.cdiv(width, block))](
        y, weights, out, width, SLOTS=k, BLOCK=block, num_warps=4, **launch_options(fused=False)
    )
    return out
