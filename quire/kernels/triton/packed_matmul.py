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
from quire.kernels.triton.tile_matmul import lines_of


@triton.jit
def _e4m3(codes, kind: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes that are 8-bit floats -> `kind`. Shifted to where a float16's exponent begins, they are a 256th."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(kind)
    bits = ((codes & 0x80).to(tl.int16) << 8) | ((codes & 0x7F).to(tl.int16) << 7)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(kind)


@triton.jit
def _byte_values(codes, kind: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes that are 8-bit floats or integers -> `kind`."""
    if KIND == "e4m3":
        return _e4m3(codes, kind, NATIVE)
    return codes.to(kind)


@triton.jit
def _scale_of(scale_ptr, at, mask):
    """Scales as float32; int8 are exponents of two, uint8 8-bit floats."""
    if scale_ptr.dtype.element_ty == tl.uint8:
        return _e4m3(tl.load(scale_ptr + at, mask=mask, other=0), tl.float32, False)
    if scale_ptr.dtype.element_ty == tl.int8:
        exponent = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.int32) & 255
        return (exponent << 23).to(tl.float32, bitcast=True)
    return tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _zero_of(zero_ptr, at, mask, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """128 more than the zero point of each line, which is 8 where none are stored, as bfloat16 [LINES, COLUMNS]."""
    if zero_ptr is None:
        zeros = tl.full([LINES, COLUMNS], 136.0, tl.bfloat16)
    else:
        zero = tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32) + 128.0
        zeros = tl.broadcast_to(zero.to(tl.bfloat16)[:, None], [LINES, COLUMNS])
    return zeros


@triton.jit
def _halves(codes, low_zero, high_zero, kind: tl.constexpr, IS_FLOAT: tl.constexpr, ASM: tl.constexpr):
    """Bytes and, as bfloat16, 128 more than the zero points of their low and high codes -> what these stand for."""
    if ASM and IS_FLOAT:
        # Shifted to where exponent and mantissa of a bfloat16 begin, E2M1 is 2 ** -126 of what it means.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd, low, high, power;
            mov.b32 power, 0x7E807E80;
            prmt.b32 even, $4, 0, 0x4140;
            prmt.b32 odd, $4, 0, 0x4342;
            shl.b32 low, even, 6;
            shl.b32 high, even, 12;
            and.b32 high, high, 0x80008000;
            lop3.b32 low, low, 0x01C001C0, high, 0xEA;
            mul.bf16x2 $0, low, power;
            shl.b32 low, odd, 6;
            shl.b32 high, odd, 12;
            and.b32 high, high, 0x80008000;
            lop3.b32 low, low, 0x01C001C0, high, 0xEA;
            mul.bf16x2 $1, low, power;
            shl.b32 low, even, 2;
            shl.b32 high, even, 8;
            and.b32 high, high, 0x80008000;
            lop3.b32 low, low, 0x01C001C0, high, 0xEA;
            mul.bf16x2 $2, low, power;
            shl.b32 low, odd, 2;
            shl.b32 high, odd, 8;
            and.b32 high, high, 0x80008000;
            lop3.b32 low, low, 0x01C001C0, high, 0xEA;
            mul.bf16x2 $3, low, power;
            }
            """,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    if ASM:
        # 128 has a bfloat16 whose last bits count ones: a code in them is 128 more than itself.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd, part;
            prmt.b32 even, $4, 0, 0x4140;
            prmt.b32 odd, $4, 0, 0x4342;
            lop3.b32 part, even, 0x000F000F, 0x43004300, 0xEA;
            sub.bf16x2 $0, part, $5;
            lop3.b32 part, odd, 0x000F000F, 0x43004300, 0xEA;
            sub.bf16x2 $1, part, $6;
            shr.b32 even, even, 4;
            shr.b32 odd, odd, 4;
            lop3.b32 part, even, 0x000F000F, 0x43004300, 0xEA;
            sub.bf16x2 $2, part, $7;
            lop3.b32 part, odd, 0x000F000F, 0x43004300, 0xEA;
            sub.bf16x2 $3, part, $8;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, low_zero, high_zero],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    low, high = codes & 15, codes >> 4
    if IS_FLOAT:  # shifted to where those of a float16 begin, it is 2 ** -14 of what it means
        low = (((low & 7).to(tl.int16) << 9) | ((low & 8).to(tl.int16) << 12)).to(tl.float16, bitcast=True)
        high = (((high & 7).to(tl.int16) << 9) | ((high & 8).to(tl.int16) << 12)).to(tl.float16, bitcast=True)
        return (low.to(tl.float32) * 16384.0).to(kind), (high.to(tl.float32) * 16384.0).to(kind)
    low = low.to(tl.float32) + 128.0 - low_zero.to(tl.float32)
    return low.to(kind), (high.to(tl.float32) + 128.0 - high_zero.to(tl.float32)).to(kind)


@triton.jit
def _spread(grid, LINES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """A number for each group [LINES, GROUPS] -> one for each column."""
    return tl.reshape(tl.broadcast_to(grid[:, :, None], [LINES, GROUPS, GROUP]), [LINES, GROUPS * GROUP])


@triton.jit
def _fine(
    values,  # [LINES, columns] float32
    scale_ptr,
    minimum_ptr,
    at,  # [LINES, COUNT]: where the scales of each SPAN columns are
    mask,
    LINES: tl.constexpr,
    COUNT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Codes times the scales of their groups, plus minima; float32."""
    values *= _spread(_scale_of(scale_ptr, at, mask), LINES, COUNT, SPAN)
    if minimum_ptr is not None:
        values += _spread(tl.load(minimum_ptr + at, mask=mask, other=0.0), LINES, COUNT, SPAN)
    return values


@triton.jit
def _fine_bytes(
    codes,  # [LINES, COLUMNS]
    scale_ptr,
    minimum_ptr,
    at,  # [LINES]: where the scale of the first column is
    mask,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weights of bytes, float32."""
    SPAN: tl.constexpr = GROUP if GROUP < COLUMNS else COLUMNS
    COUNT: tl.constexpr = COLUMNS // SPAN
    values = _byte_values(codes, tl.float32, KIND, NATIVE)
    each = at[:, None] + tl.arange(0, COUNT)[None, :]
    return _fine(values, scale_ptr, minimum_ptr, each, mask[:, None], LINES, COUNT, SPAN)


@triton.jit
def _fine_halves(
    codes,  # bytes [LINES, HALF]
    scale_ptr,
    minimum_ptr,
    groups,  # [LINES]: where the scales of the lines begin
    start,
    mask,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weights of the low and of the high codes of columns from `start` on, float32."""
    SPAN: tl.constexpr = GROUP if GROUP < 32 else 32
    COUNT: tl.constexpr = HALF // SPAN
    index = tl.arange(0, COUNT) * SPAN
    first = start + index // 32 * 64 + index % 32
    zero = tl.full([LINES, HALF], 136.0 if minimum_ptr is None else 128.0, tl.bfloat16)
    low, high = _halves(codes, zero, zero, tl.float32, KIND == "e2m1", False)
    at = groups[:, None] + (first // GROUP)[None, :]
    low = _fine(low, scale_ptr, minimum_ptr, at, mask[:, None], LINES, COUNT, SPAN)
    at = groups[:, None] + ((first + 32) // GROUP)[None, :]
    high = _fine(high, scale_ptr, minimum_ptr, at, mask[:, None], LINES, COUNT, SPAN)
    return low, high


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
    num_slots,
    num_tiles,
    num_rows,
    N,
    K,
    KIND: tl.constexpr,  # of codes: int4, e2m1, int8, e4m3
    FINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,  # slots are sorted into tiles; else slot s is line s of x and there is one matrix
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    ASM: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
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
    HALF: tl.constexpr = BK // 2
    half = tl.arange(0, HALF)
    line = expert * N + lines
    x_at = x_ptr + (slots // PER_ROW).to(tl.int64)[None, :] * K + (half // 32 * 64 + half % 32)[:, None]
    groups = line * (K // GROUP)
    kind = x_ptr.dtype.element_ty
    acc = tl.zeros([BN, BT], tl.float32)
    if KIND == "int8" or KIND == "e4m3":
        columns = tl.arange(0, BK)
        x_at = x_ptr + (slots // PER_ROW).to(tl.int64)[None, :] * K + columns[:, None]
        codes_at = codes_ptr + line[:, None] * K + columns[None, :]
        for start in range(0, K, BK):
            codes = tl.load(codes_at + start, mask=line_mask[:, None], other=0)
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            if FINE:
                at = groups + start // GROUP
                values = _fine_bytes(codes, scale_ptr, minimum_ptr, at, line_mask, KIND, NATIVE_FP8, BN, BK, GROUP)
                acc = tl.dot(values.to(kind), x, acc, input_precision="ieee")
            else:
                values = _byte_values(codes, kind, KIND, NATIVE_FP8)
                scale = _scale_of(scale_ptr, groups + start // GROUP, line_mask)
                acc += tl.dot(values, x, input_precision="ieee") * scale[:, None]
    else:
        codes_at = codes_ptr + line[:, None] * (K // 2) + half[None, :]
        for start in range(0, K, BK):  # K is whole pieces
            codes = tl.load(codes_at + start // 2, mask=line_mask[:, None], other=0)
            x_low = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            x_high = tl.load(x_at + start + 32, mask=inside[None, :], other=0.0)
            if FINE:
                low, high = _fine_halves(
                    codes, scale_ptr, minimum_ptr, groups, start, line_mask, KIND, BN, HALF, GROUP
                )
                acc = tl.dot(low.to(kind), x_low, acc, input_precision="ieee")
                acc = tl.dot(high.to(kind), x_high, acc, input_precision="ieee")
            else:
                at = groups + start // GROUP
                low_zero = _zero_of(zero_ptr, at, line_mask, BN, HALF)
                high_zero = _zero_of(zero_ptr, at + 1, line_mask, BN, HALF) if GROUP == 32 else low_zero
                low, high = _halves(codes, low_zero, high_zero, kind, KIND == "e2m1", ASM)
                part = tl.dot(low, x_low, input_precision="ieee")
                scale = _scale_of(scale_ptr, at, line_mask)
                if GROUP == 32:
                    acc += part * scale[:, None]
                    scale = _scale_of(scale_ptr, at + 1, line_mask)
                    part = tl.dot(high, x_high, input_precision="ieee")
                else:
                    part = tl.dot(high, x_high, part, input_precision="ieee")
                acc += part * scale[:, None]
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
    N,
    K,
    KIND: tl.constexpr,
    FINE: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of some lines, in the type of the result."""
    begin_dependent(PDL)
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    start = tl.program_id(1) * 64
    mask = lines < N
    line = lines.to(tl.int64)
    groups = line * (K // GROUP)
    line_scale = tl.full([LINES, 1], 1.0, tl.float32)
    if line_scale_ptr is not None:
        line_scale = tl.load(line_scale_ptr + line, mask=mask, other=0.0)[:, None]
    if KIND == "int8" or KIND == "e4m3":
        columns = start + tl.arange(0, 64)
        codes = tl.load(codes_ptr + line[:, None] * K + columns[None, :], mask=mask[:, None], other=0)
        values = _byte_values(codes, tl.float32, KIND, False)
        at = groups[:, None] + (columns // GROUP)[None, :]
        values = _fine(values, scale_ptr, minimum_ptr, at, mask[:, None], LINES, 64, 1)
        at = out_ptr + line[:, None] * K + columns[None, :]
        tl.store(at, (values * line_scale).to(out_ptr.dtype.element_ty), mask=mask[:, None])
        return
    half = tl.arange(0, 32)
    codes = tl.load(codes_ptr + line[:, None] * (K // 2) + start // 2 + half[None, :], mask=mask[:, None], other=0)
    if FINE:
        low, high = _fine_halves(codes, scale_ptr, minimum_ptr, groups, start, mask, KIND, LINES, 32, GROUP)
    else:
        low_group, high_group = groups + start // GROUP, groups + (start + 32) // GROUP
        low_zero = _zero_of(zero_ptr, low_group, mask, LINES, 32)
        high_zero = _zero_of(zero_ptr, high_group, mask, LINES, 32)
        low, high = _halves(codes, low_zero, high_zero, tl.float32, KIND == "e2m1", False)
        low *= _scale_of(scale_ptr, low_group, mask)[:, None]
        high *= _scale_of(scale_ptr, high_group, mask)[:, None]
    at = out_ptr + line[:, None] * K + start + half[None, :]
    tl.store(at, (low * line_scale).to(out_ptr.dtype.element_ty), mask=mask[:, None])
    tl.store(at + 32, (high * line_scale).to(out_ptr.dtype.element_ty), mask=mask[:, None])


def _parts(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """What kernels read of a weight: 8-bit floats as bytes, exponents as bytes with a sign."""
    codes = weight.codes.view(torch.uint8) if weight.codes.dtype == E4M3 else weight.codes
    viewed = {E4M3: torch.uint8, torch.uint8: torch.int8}.get(weight.scales.dtype)
    scales = weight.scales if viewed is None else weight.scales.view(viewed)
    return codes, scales, weight.zeros, weight.minima, weight.line_scale


def _kind(weight: PackedWeight) -> str:
    if weight.has_bytes:
        return "int8" if weight.codes.dtype == torch.int8 else "e4m3"
    return "e2m1" if weight.is_float else "int4"


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The values [N, K] of one matrix."""
    _, n, k = weight.sizes
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    lines = 32
    _unpack_kernel[(triton.cdiv(n, lines), k // CHUNK)](
        *_parts(weight),
        out,
        n,
        k,
        KIND=_kind(weight),
        FINE=weight.is_fine,
        GROUP=weight.group,
        LINES=lines,
        num_warps=4,
        **launch_options(),
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


@cache
def has_fp8_arithmetic() -> bool:
    """Whether 8-bit floats are converted by an instruction."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def packed_tiles(
    x: Tensor,
    slots: SortedSlots | None,
    weight: PackedWeight,
    bias: Tensor | None,
    per_row: int,
    shape: GroupedShape,
    activation: str = "",
    weights: Tensor | None = None,
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert -> [slots, N], or N / 2 with an activation.

    Without `slots` there is one matrix, and every line of x is a slot. With `weights` [n, k] the result of each slot
    is weighted: [k, n, N] float32.
    """
    _, n, k = weight.sizes
    bk = piece(weight, shape.bk)
    assert k % bk == 0
    num_slots = x.shape[0] if slots is None else slots.order.shape[0]
    out = empty_slots(x, num_slots, n // 2 if activation else n, weights)
    num_tiles = triton.cdiv(num_slots, shape.bt) if slots is None else slots.tiles.shape[1]
    order, tiles = (out, out) if slots is None else (slots.order, slots.tiles)
    _packed_kernel[(num_tiles * triton.cdiv(n, shape.bn),)](
        x,
        *_parts(weight),
        bias,
        out,
        out if weights is None else weights,
        order,
        tiles,
        num_slots,
        num_tiles,
        out.shape[1],
        n,
        k,
        KIND=_kind(weight),
        FINE=weight.is_fine,
        GROUP=weight.group,
        ACTIVATION=activation,
        GROUPED=slots is not None,
        TOP_K=0 if weights is None else weights.shape[1],
        PER_ROW=per_row,
        ASM=x.dtype == torch.bfloat16 and has_packed_arithmetic(),
        NATIVE_FP8=has_fp8_arithmetic(),
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
