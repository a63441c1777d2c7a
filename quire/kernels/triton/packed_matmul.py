"""Matmuls with 4-bit weights, which are unpacked in the kernel: of experts, and of one matrix, which is an expert too.

A byte holds two columns of a line that are 32 apart: columns 64 c + j in the low bits, 64 c + 32 + j in the high
ones (j < 32). So both halves of a piece are read with activations that lie side by side. Every group of columns has a
scale, and integers may have a zero point; E2M1 has scales that are powers of two, stored as exponents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.expert_slots import SortedSlots
from quire.kernels.triton.grouped_matmul import GroupedShape, activated
from quire.kernels.triton.launch import begin_dependent, launch_options, stages_within
from quire.kernels.triton.tile_matmul import lines_of

CHUNK = 64  # columns whose halves share bytes


@dataclass(frozen=True)
class PackedWeight:
    """[experts, N, K] in 4 bits. `zeros` None: of integers, 8 stands for 0."""

    codes: Tensor  # [experts, N, K / 2] uint8
    scales: Tensor  # [experts, N, K / group] of a float type; uint8: exponents
    zeros: Tensor | None = None  # [experts, N, K / group] uint8
    is_float: bool = False  # codes are E2M1

    @property
    def sizes(self) -> tuple[int, int, int]:
        experts, n, half = self.codes.shape
        return experts, n, 2 * half

    @property
    def group(self) -> int:
        return self.sizes[2] // self.scales.shape[2]


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [..., K] of 4 bits -> [..., K / 2] uint8; K is whole chunks."""
    halves = codes.to(torch.uint8).unflatten(-1, (-1, 2, CHUNK // 2))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)


@triton.jit
def _scale_of(scale_ptr, at, mask):
    """Scales as float32; bytes are exponents of two."""
    if scale_ptr.dtype.element_ty == tl.uint8:
        exponent = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.int32)
        return (exponent << 23).to(tl.float32, bitcast=True)
    return tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _spread(values, LINES: tl.constexpr, CHUNKS: tl.constexpr):
    """[LINES, CHUNKS], one for each half chunk -> [LINES, CHUNKS * 32]."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [LINES, CHUNKS, 32]), [LINES, CHUNKS * 32])


@triton.jit
def _decoded(codes, scale, zero, IS_FLOAT: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Codes of 4 bits, their scales and zero points, all of one shape -> float32."""
    if IS_FLOAT:
        # Shifted so that its exponent and mantissa are those of a float16, E2M1 is 2 ** -14 of what it means.
        bits = ((codes & 7).to(tl.int16) << 9) | ((codes & 8).to(tl.int16) << 12)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * (scale * 16384.0)
    number = codes.to(tl.float32)
    return (number - (zero if HAS_ZEROS else 8.0)) * scale


@triton.jit
def _halves(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    line,  # [LINES] int64
    line_mask,
    start,
    K,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The two halves of PIECE columns from `start` on, [LINES, PIECE / 2] float32 each."""
    CHUNKS: tl.constexpr = PIECE // 64
    HALF: tl.constexpr = PIECE // 2
    inner = start // 2 + tl.arange(0, HALF)
    at = line[:, None] * (K // 2) + inner[None, :]
    codes = tl.load(codes_ptr + at, mask=line_mask[:, None] & (inner < K // 2)[None, :], other=0)
    chunks = start + tl.arange(0, CHUNKS) * 64
    group_mask = line_mask[:, None] & (chunks < K)[None, :]
    low_at = line[:, None] * (K // GROUP) + (chunks // GROUP)[None, :]
    low_scale = _scale_of(scale_ptr, low_at, group_mask)
    low_zero = low_scale
    if HAS_ZEROS:
        low_zero = tl.load(zero_ptr + low_at, mask=group_mask, other=0).to(tl.float32)
    high_scale, high_zero = low_scale, low_zero
    if GROUP < 64:
        high_at = line[:, None] * (K // GROUP) + ((chunks + 32) // GROUP)[None, :]
        high_scale = _scale_of(scale_ptr, high_at, group_mask)
        if HAS_ZEROS:
            high_zero = tl.load(zero_ptr + high_at, mask=group_mask, other=0).to(tl.float32)
    low = _decoded(
        codes & 15, _spread(low_scale, LINES, CHUNKS), _spread(low_zero, LINES, CHUNKS), IS_FLOAT, HAS_ZEROS
    )
    high = _decoded(
        codes >> 4, _spread(high_scale, LINES, CHUNKS), _spread(high_zero, LINES, CHUNKS), IS_FLOAT, HAS_ZEROS
    )
    return low, high


@triton.jit
def _packed_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,  # [slots, width]
    order_ptr,
    tiles_ptr,  # [3, tiles]
    num_slots,
    num_tiles,
    N,
    K,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,  # slots are sorted into tiles; else slot s is line s of x and there is one matrix
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line_tiles = tl.cdiv(N, BN)
    tile, line_tile = tl.program_id(0) // line_tiles, tl.program_id(0) % line_tiles
    if GROUPED:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        if expert < 0:
            return
        places = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BT)
        inside = places < tl.load(tiles_ptr + 2 * num_tiles + tile)
        slots = tl.load(order_ptr + places, mask=inside, other=0)
    else:
        expert = tl.zeros([], tl.int64)
        slots = tile * BT + tl.arange(0, BT)
        inside = slots < num_slots
    lines, outputs, width = lines_of(line_tile, N, BN, ACTIVATION != "")
    line_mask = outputs < width
    half = tl.arange(0, BK // 2)
    low_columns = half // 32 * 64 + half % 32
    x_at = x_ptr + (slots // PER_ROW).to(tl.int64)[None, :] * K + low_columns[:, None]
    acc = tl.zeros([BN, BT], tl.float32)
    for start in range(0, K, BK):
        low, high = _halves(
            codes_ptr, scale_ptr, zero_ptr, expert * N + lines, line_mask, start, K, IS_FLOAT, HAS_ZEROS, GROUP, BN, BK
        )
        x_mask = inside[None, :] & (start + low_columns < K)[:, None]
        x_low = tl.load(x_at + start, mask=x_mask, other=0.0)
        x_high = tl.load(x_at + start + 32, mask=x_mask, other=0.0)
        acc = tl.dot(low.to(x_low.dtype), x_low, acc, input_precision="ieee")
        acc = tl.dot(high.to(x_high.dtype), x_high, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + lines, mask=line_mask, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        acc = activated(acc, out_ptr.dtype.element_ty, BN, BT, ACTIVATION)
        outputs = line_tile * (BN // 2) + tl.arange(0, BN // 2)
    at = slots.to(tl.int64)[:, None] * width + outputs[None, :]
    mask = inside[:, None] & (outputs < width)[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _packed_one_row_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,  # [slots, width]
    N,
    K,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for few slots, a program for some lines of each: multiply and add over long contiguous pieces."""
    begin_dependent(PDL)
    slot = tl.program_id(1)
    expert = tl.zeros([], tl.int64)
    if GROUPED:
        expert = tl.load(ids_ptr + slot).to(tl.int64)
    lines, outputs, width = lines_of(tl.program_id(0), N, LINES, ACTIVATION != "")
    inside = outputs < width
    half = tl.arange(0, COLS // 2)
    low_columns = half // 32 * 64 + half % 32
    x_ptr += slot // PER_ROW * K
    acc = tl.zeros([LINES, COLS // 2], tl.float32)
    for start in range(0, K, COLS):
        low, high = _halves(
            codes_ptr, scale_ptr, zero_ptr, expert * N + lines, inside, start, K, IS_FLOAT, HAS_ZEROS, GROUP, LINES,
            COLS,
        )  # fmt: skip
        present = start + low_columns < K
        x_low = tl.load(x_ptr + start + low_columns, mask=present, other=0.0)
        x_high = tl.load(x_ptr + start + 32 + low_columns, mask=present, other=0.0)
        # Rounded like what matrix units multiply by.
        kind = x_ptr.dtype.element_ty
        acc += low.to(kind).to(tl.float32) * x_low.to(tl.float32)[None, :]
        acc += high.to(kind).to(tl.float32) * x_high.to(tl.float32)[None, :]
    out = tl.sum(acc, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + expert * N + lines, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        out = tl.reshape(activated(out[:, None], out_ptr.dtype.element_ty, LINES, 1, ACTIVATION), [LINES // 2])
        outputs = tl.program_id(0) * (LINES // 2) + tl.arange(0, LINES // 2)
    tl.store(out_ptr + slot * width + outputs, out.to(out_ptr.dtype.element_ty), mask=outputs < width)


class _Given(NamedTuple):
    """What both kernels take of a weight and its bias."""

    tensors: tuple[Tensor, ...]
    known: dict[str, object]
    width: int


def _given(weight: PackedWeight, bias: Tensor | None, activation: str) -> _Given:
    _, n, k = weight.sizes
    assert k % CHUNK == 0
    assert weight.group % 32 == 0
    zeros = weight.codes if weight.zeros is None else weight.zeros
    known: dict[str, object] = {
        "IS_FLOAT": weight.is_float,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_BIAS": bias is not None,
        "ACTIVATION": activation,
        "GROUP": weight.group,
    }
    bias = weight.scales if bias is None else bias
    return _Given((weight.codes, weight.scales, zeros, bias), known, n // 2 if activation else n)


def packed_tiles(
    x: Tensor,
    slots: SortedSlots | None,
    weight: PackedWeight,
    bias: Tensor | None,
    per_row: int,
    shape: GroupedShape,
    activation: str = "",
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], or N / 2 with an activation.

    Without `slots` there is one matrix, and every line of x is a slot.
    """
    _, n, k = weight.sizes
    given = _given(weight, bias, activation)
    num_slots = x.shape[0] if slots is None else slots.order.shape[0]
    out = torch.empty(num_slots, given.width, dtype=x.dtype, device=x.device)
    num_tiles = triton.cdiv(num_slots, shape.bt) if slots is None else slots.tiles.shape[1]
    order, tiles = (out, out) if slots is None else (slots.order, slots.tiles)
    _packed_kernel[(num_tiles * triton.cdiv(n, shape.bn),)](
        x,
        *given.tensors,
        out,
        order,
        tiles,
        num_slots,
        num_tiles,
        n,
        k,
        GROUPED=slots is not None,
        PER_ROW=per_row,
        BT=shape.bt,
        BN=shape.bn,
        BK=shape.bk,
        num_warps=shape.num_warps,
        num_stages=stages_within(shape.num_stages, (shape.bt * x.element_size() + shape.bn) * shape.bk),
        **given.known,
        **launch_options(),
    )
    return out


def packed_one_row(
    x: Tensor,
    expert_ids: Tensor | None,
    weight: PackedWeight,
    bias: Tensor | None,
    per_row: int,
    activation: str = "",
    lines: int = 4,
    cols: int = 1024,
    num_warps: int = 4,
) -> Tensor:
    """The same for few slots."""
    _, n, k = weight.sizes
    given = _given(weight, bias, activation)
    num_slots = x.shape[0] if expert_ids is None else expert_ids.numel()
    out = torch.empty(num_slots, given.width, dtype=x.dtype, device=x.device)
    _packed_one_row_kernel[(triton.cdiv(n, lines), num_slots)](
        x,
        *given.tensors,
        out if expert_ids is None else expert_ids,
        out,
        n,
        k,
        GROUPED=expert_ids is not None,
        PER_ROW=per_row,
        LINES=lines,
        COLS=cols,
        num_warps=num_warps,
        **given.known,
        **launch_options(),
    )
    return out
