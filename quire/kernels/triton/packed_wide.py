"""Matmuls with quantized weights for some tokens and more: both sides are copied by the tensor memory unit.

Weights are unpacked in registers and are the left operand; all columns of a piece go into one matrix multiplication.
Slots of experts lie sorted, so that a tile's are lines side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.packed import CHUNK, PIECE, PackedWeight
from quire.kernels.triton.expert_slots import SortedSlots
from quire.kernels.triton.grouped_matmul import GroupedShape, empty_slots, gated, weighted
from quire.kernels.triton.launch import begin_dependent, has_large_tiles, launch_options, stages_within
from quire.kernels.triton.matmul import arrival_counters
from quire.kernels.triton.packed_matmul import _kind, _parts, has_packed_arithmetic
from quire.kernels.triton.packed_values import float_slices, scale_of, slice_of, slices_of
from quire.kernels.triton.tile_matmul import add_splits, sum_splits
from quire.kernels.triton.widen import byte_values, rounded

ALIGNMENT = 16  # bytes, of what the copies begin at


@triton.jit
def _side_by_side(w0, w1, w2, w3, LINES: tl.constexpr, CHUNKS: tl.constexpr):
    """Slices [LINES, words] -> the columns in their order."""
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    joined = tl.permute(tl.reshape(joined, [LINES, CHUNKS, 16, 4]), (0, 1, 3, 2))
    return tl.reshape(joined, [LINES, CHUNKS * 64])


@triton.jit
def _numbers_at(scale_ptr, zero_ptr, at, mask, KIND: tl.constexpr):
    """What is stored for a piece of each line: a scale and a zero point, or exponents of both halves of a chunk.

    Loaded where they are needed: carried from one iteration to the next, they would decide about the layout of codes.
    """
    if KIND == "e2m1":
        first = tl.load(scale_ptr + at, mask=mask, other=0)
        second = tl.load(scale_ptr + at + 1, mask=mask, other=0)
    else:
        first = scale_of(scale_ptr, at, mask)
        second = first
        if zero_ptr is not None:
            second = tl.load(zero_ptr + at, mask=mask, other=0)
    return first, second


@triton.jit
def _power(exponent, ASM: tl.constexpr):
    """Powers of two of lines, a column: float32, or bfloat16 2 ** 63 times them for `float_slices`."""
    if ASM:
        power = (((exponent.to(tl.int16) & 255) + 63) << 7).to(tl.bfloat16, bitcast=True)
    else:
        power = ((exponent.to(tl.int32) & 255) << 23).to(tl.float32, bitcast=True)
    return power[:, None]


@triton.jit
def _scaled_integers(words, zero, scale):
    """Words of integers -> four slices as bfloat16, less zero points (which are 128 more) and times scales."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 part;
        lop3.b32 part, $4, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 part, part, $5;
        mul.bf16x2 $0, part, $6;
        shr.b32 part, $4, 4;
        lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 part, part, $5;
        mul.bf16x2 $1, part, $6;
        shr.b32 part, $4, 8;
        lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 part, part, $5;
        mul.bf16x2 $2, part, $6;
        shr.b32 part, $4, 12;
        lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 part, part, $5;
        mul.bf16x2 $3, part, $6;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, zero, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _columns(
    words, first, second, kind: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, IN_SUMS: tl.constexpr,
    ASM: tl.constexpr, LINES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Words and what `_numbers_at` gives -> weights in the order of columns; bytes are so already, and not scaled.

    Integers are not scaled if IN_SUMS; E2M1 are 2 ** -63 of what they mean if ASM.
    """
    WORDS: tl.constexpr = CHUNKS * 16
    if KIND == "int8" or KIND == "e4m3":
        columns = byte_values(words, kind, KIND)
    elif KIND == "e2m1":
        low = tl.broadcast_to(_power(first, ASM), [LINES, WORDS])
        high = tl.broadcast_to(_power(second, ASM), [LINES, WORDS])
        if ASM:
            w0, w1, w2, w3 = float_slices(words, low, high)
        else:
            w0, w1 = (slice_of(words, low, 0, True) * low).to(kind), (slice_of(words, low, 1, True) * low).to(kind)
            w2, w3 = (slice_of(words, low, 2, True) * high).to(kind), (slice_of(words, low, 3, True) * high).to(kind)
        columns = _side_by_side(w0, w1, w2, w3, LINES, CHUNKS)
    else:
        zero = tl.full([LINES, WORDS], 136.0, tl.bfloat16)
        if HAS_ZEROS:
            zero = tl.broadcast_to((second.to(tl.float32) + 128.0).to(tl.bfloat16)[:, None], [LINES, WORDS])
        if IN_SUMS:
            w0, w1, w2, w3 = slices_of(words, zero, zero, kind, False, ASM, LINES, WORDS)
        elif ASM:
            scale = tl.broadcast_to(first.to(tl.bfloat16)[:, None], [LINES, WORDS])
            w0, w1, w2, w3 = _scaled_integers(words, zero, scale)
        else:
            scale = first[:, None]
            w0, w1, w2, w3 = slices_of(words, zero, zero, tl.float32, False, False, LINES, WORDS)
            w0, w1 = (w0 * scale).to(kind), (w1 * scale).to(kind)
            w2, w3 = (w2 * scale).to(kind), (w3 * scale).to(kind)
        columns = _side_by_side(w0, w1, w2, w3, LINES, CHUNKS)
    return columns


@triton.jit
def _add_dot(acc, w, x, scale, IN_SUMS: tl.constexpr, ASM: tl.constexpr, AWAITED: tl.constexpr, SAME: tl.constexpr):
    """acc plus w times x. The last of an iteration is AWAITED; one before it runs while weights are unpacked.

    Registers that are an operand cannot be filled while it is read: if none were awaited, the compiler would begin
    the next iteration first, and then has all matrix instructions wait for one another.
    """
    if IN_SUMS:
        acc += tl.dot(w, x, input_precision="ieee") * (scale if SAME else scale[:, None])
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if ASM and AWAITED:
            acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def _with_line(acc, line_scale_ptr, bias_ptr, line, mask):
    """Sums times the scale of their line, plus its bias."""
    if line_scale_ptr is not None:
        acc *= tl.load(line_scale_ptr + line, mask=mask, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + line, mask=mask, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def _put(
    acc, more, place, inside, line, outputs, width, line_scale_ptr, bias_ptr, out_ptr, weights_ptr, order_ptr,
    num_rows, kind: tl.constexpr, ACTIVATION: tl.constexpr, SCATTER: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Store the sums of a tile's lines and slots, with what is theirs besides."""
    line_mask = outputs < width
    slots = place
    acc = _with_line(acc, line_scale_ptr, bias_ptr, line, line_mask)
    if ACTIVATION != "":
        more = _with_line(more, line_scale_ptr, bias_ptr, line + width, line_mask)
        acc = gated(rounded(acc, kind), rounded(more, kind), ACTIVATION)
    if SCATTER:
        slots = tl.load(order_ptr + place, mask=inside, other=0)
    if TOP_K > 0:
        acc = weighted(acc, weights_ptr, slots, inside, kind)
        slots = slots % TOP_K * num_rows + slots // TOP_K
    at = slots.to(tl.int64)[:, None] * width + outputs[None, :]
    mask = inside[:, None] & line_mask[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_of(
    tiles_ptr, num_slots, num_tiles, width, GROUPED: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A program's expert (-1: there is none), first slot, the slot behind its last, and number of its lines' tile."""
    program, line_tiles = tl.program_id(0), tl.cdiv(width, BN)
    if GROUPED:
        tile, line_tile = program // line_tiles, program % line_tiles
        expert = tl.load(tiles_ptr + tile)
        first_slot, last_slot = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    else:  # tiles of the same lines side by side: the second finds them in the L2 cache
        tile, line_tile = program % num_tiles, program // num_tiles
        expert, first_slot, last_slot = tile * 0, tile * BT, tile * 0 + num_slots
    return expert, first_slot, last_slot, line_tile


@triton.jit
def _packed_wide_kernel(
    x_tiles,  # descriptor of x [slots, K], tiles of [BT, BK]
    word_tiles,  # descriptor of codes [experts * N, K / PER_WORD], tiles of [BN, BK / PER_WORD]
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
    KIND: tl.constexpr,  # of codes: int4, e2m1, int8, e4m3
    PER_WORD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,
    SCATTER: tl.constexpr,  # results stand where their slots do, else sorted
    TOP_K: tl.constexpr,  # slots of a row, whose results are weighted; 0: they are not
    GROUP: tl.constexpr,
    IN_SUMS: tl.constexpr,  # scales multiply sums of a piece, else weights, which are rounded again
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PAIRED: tl.constexpr,  # two pieces of BK columns in an iteration
    SAME_SCALES: tl.constexpr,  # the lines of a tile have the same
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    CHUNKS: tl.constexpr = BK // 64
    kind: tl.constexpr = x_tiles.dtype
    width = N if ACTIVATION == "" else N // 2
    expert, first_slot, last_slot, line_tile = _tile_of(tiles_ptr, num_slots, num_tiles, width, GROUPED, BT, BN)
    if expert < 0:
        return
    place = first_slot + tl.arange(0, BT)
    inside = place < last_slot
    begin = tl.program_id(1) * k_per_split
    outputs = line_tile * BN + tl.arange(0, BN)
    line_mask = outputs < width
    line = (expert * N + outputs).to(tl.int64)
    groups = line * (K // GROUP)
    # Two sums: of gates and of what they gate, or of pieces that are even and odd.
    HAS_MORE: tl.constexpr = ACTIVATION != "" or PAIRED
    more_lines = width if ACTIVATION != "" else 0
    next_column = BK if PAIRED else 0
    first_line = expert * N + line_tile * BN
    more_groups = groups + more_lines * (K // GROUP)
    acc, more = tl.zeros([BN, BT], tl.float32), tl.zeros([BN, BT], tl.float32)
    STEP: tl.constexpr = 2 * BK if PAIRED else BK
    if SAME_SCALES:  # numbers, which can be asked for while the piece before is multiplied
        scale_at = scale_ptr + first_line.to(tl.int64) * (K // GROUP)
        more_at = scale_at + more_lines * (K // GROUP)
        next_scale, next_more = tl.load(scale_at + begin // GROUP), tl.load(more_at + begin // GROUP)
    for start in range(begin, tl.minimum(begin + k_per_split, K), STEP):
        if SAME_SCALES:
            a, b, c, d = next_scale, next_scale, next_more, next_more
            after = tl.minimum(start + STEP, K - STEP) // GROUP
            next_scale, next_more = tl.load(scale_at + after), tl.load(more_at + after)
        else:
            a, b = _numbers_at(scale_ptr, zero_ptr, groups + start // GROUP, line_mask, KIND)
            if HAS_MORE:
                c, d = _numbers_at(scale_ptr, zero_ptr, more_groups + (start + next_column) // GROUP, line_mask, KIND)
        words = word_tiles.load([first_line, start // PER_WORD])
        x = x_tiles.load([first_slot, start]).T
        w = _columns(words, a, b, kind, KIND, zero_ptr is not None, IN_SUMS, ASM, BN, CHUNKS)
        acc = _add_dot(acc, w, x, a, IN_SUMS, ASM, not HAS_MORE, SAME_SCALES)
        if HAS_MORE:
            words = word_tiles.load([first_line + more_lines, (start + next_column) // PER_WORD])
            if PAIRED:
                x = x_tiles.load([first_slot, start + next_column]).T
            w = _columns(words, c, d, kind, KIND, zero_ptr is not None, IN_SUMS, ASM, BN, CHUNKS)
            more = _add_dot(more, w, x, c, IN_SUMS, ASM, True, SAME_SCALES)
    acc += more if PAIRED else 0.0
    if KIND == "e2m1" and ASM:
        acc *= 9223372036854775808.0  # 2 ** 63
        more *= 9223372036854775808.0
    if SPLITS > 1:
        split_at = place.to(tl.int64)[None, :] * N + outputs[:, None]
        mask = inside[None, :] & line_mask[:, None]
        size = num_slots * N
        if ACTIVATION != "":  # before the sums of the first half are counted
            tl.store(parts_ptr + tl.program_id(1).to(tl.int64) * size + split_at + width, more, mask=mask)
        acc, is_last = add_splits(acc, parts_ptr, counters_ptr, size, split_at, mask, SPLITS)
        if not is_last:
            return
        if ACTIVATION != "":
            more = sum_splits(parts_ptr + width, size, split_at, mask, BN, BT, SPLITS)
    _put(
        acc, more, place, inside, line, outputs, width, line_scale_ptr, bias_ptr, out_ptr, weights_ptr, order_ptr,
        num_rows, kind, ACTIVATION, SCATTER, TOP_K,
    )  # fmt: skip


def wide_fits(x: Tensor, *weights: PackedWeight) -> bool:
    """Whether x and codes can be copied by such a unit, and a piece of codes has one scale, or two powers of two."""
    if not has_packed_arithmetic() or not has_large_tiles():
        return False
    if x.dtype != torch.bfloat16 or x.data_ptr() % ALIGNMENT:
        return False
    return all(_fits(weight) for weight in weights)


def _fits(weight: PackedWeight) -> bool:
    if weight.is_fine or weight.codes.data_ptr() % ALIGNMENT:
        return False
    if weight.has_bytes:
        return weight.group % PIECE == 0
    if weight.is_float:
        return weight.group == 32 and weight.scales.dtype == torch.uint8
    return weight.group % CHUNK == 0 and (weight.group % 128 == 0 or weight.group == CHUNK)


def packed_wide(
    x: Tensor,
    slots: SortedSlots | None,
    weight: PackedWeight,
    bias: Tensor | None,
    shape: GroupedShape,
    activation: str = "",
    weights: Tensor | None = None,
    splits: int = 1,
    in_sums: bool = True,
    scatter: bool = False,
    paired: bool = False,
) -> Tensor:
    """x [slots, K], sorted if there are `slots`, times the matrices of their experts -> [slots, N].

    With an activation half as wide; sorted or, with `scatter`, where the slots stand. With `weights` [n, k] also
    weighted: [k, n, N] float32. `in_sums`: whether scales multiply sums, which is more exact, or weights.
    """
    experts, n, k = weight.sizes
    num_slots = x.shape[0]
    halves = 2 if activation else 1
    out = empty_slots(x, num_slots, n // halves, weights)
    num_tiles = triton.cdiv(num_slots, shape.bt) if slots is None else slots.tiles.shape[1]
    order, tiles = (out, out) if slots is None else (slots.order, slots.tiles)
    assert slots is None or slots.size == shape.bt
    assert in_sums or not weight.has_bytes
    codes, scales, zeros, _, line_scale = _parts(weight)
    assert codes is not None
    per_word, code_bits = (1, 8) if weight.has_bytes else (4, 4)
    codes = codes.view(experts * n, k // per_word)
    parts, counters = out, out
    if splits > 1:
        parts = torch.empty(splits, num_slots, n, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    bk = CHUNK if weight.is_float else min(shape.bk, weight.group)
    has_numbers = weight.scales.dtype in (torch.float32, torch.float16, torch.bfloat16)  # not exponents
    paired = paired and not activation and not in_sums and k % (2 * bk) == 0
    step = bk * (1 + paired)
    stage = (4 * shape.bt + halves * shape.bn * code_bits // 4) * step // 2  # bytes of both sides
    _packed_wide_kernel[(num_tiles * triton.cdiv(n // halves, shape.bn), splits)](
        TensorDescriptor(x, list(x.shape), [k, 1], [shape.bt, bk]),
        TensorDescriptor(codes, list(codes.shape), [k // per_word, 1], [shape.bn, bk // per_word]),
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
        triton.cdiv(triton.cdiv(k, splits), step) * step,
        KIND=_kind(weight),
        PER_WORD=per_word,
        ACTIVATION=activation,
        GROUPED=slots is not None,
        SCATTER=scatter or weights is not None,
        TOP_K=0 if weights is None else weights.shape[1],
        GROUP=weight.group,
        IN_SUMS=in_sums and not weight.is_float,
        ASM=x.dtype == torch.bfloat16 and has_packed_arithmetic(),
        SPLITS=splits,
        BT=shape.bt,
        BN=shape.bn,
        BK=bk,
        PAIRED=paired,
        SAME_SCALES=in_sums and weight.has_bytes and has_numbers and weight.rows_per_scale % shape.bn == 0,
        num_warps=shape.num_warps,
        num_stages=stages_within(shape.num_stages, stage, 4096),
        **launch_options(),
    )
    return out
