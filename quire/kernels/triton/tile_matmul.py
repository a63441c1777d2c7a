"""Matmuls as tiles of outputs x tokens: the weight is the left operand, so a few tokens still fill the matrix units.

Weights are [out_features, in_features]. Within a split the inner sum always runs in the same order, whatever the
number of tokens; with one split a token's result therefore never depends on the other tokens of the step.

A gated activation may follow in the same kernel: then the weight's first half are gates, the second what they are
multiplied with, and each tile has lines of both, one beside the other. Splits are added up by the last program of a
tile, or left as they are to the kernel that reads the matmul next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import gate_times_up
from quire.kernels.triton.launch import (
    allow_dependents,
    launch_options,
    prefetch_lines,
    stages_within,
    wait_for_predecessor,
)
from quire.kernels.triton.shrink_beside import Beside, beside_arguments, num_programs, room_of, shrink_tile

_MIN_TOKENS = 16  # the narrowest tile of a matrix unit
# Where a tile is not full, a mask costs more than reading the last token again in shorter lines, less in longer ones.
_LONG = 4096


@triton.jit
def lines_of(tile, N, LINES: tl.constexpr, GATED: tl.constexpr):
    """The lines of a weight [N, ...] that a tile is made of, each line's output, and how many outputs there are."""
    index = tl.arange(0, LINES)
    if GATED:
        outputs = tile * (LINES // 2) + index // 2
        return outputs + index % 2 * (N // 2), outputs, N // 2
    return tile * LINES + index, tile * LINES + index, N


@triton.jit
def sum_splits(parts_ptr, size, at, mask, LINES: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr):
    """Parts [SPLITS, size] float32 at `at` [LINES, TOKENS], added in their order."""
    acc = tl.zeros([LINES, TOKENS], tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled: all are on their way at once
        part_ptr = parts_ptr + tl.full([], split, tl.int64) * size
        acc += tl.load(part_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def add_splits(acc, parts_ptr, counters_ptr, size, at, mask, SPLITS: tl.constexpr):
    """acc of program (tile, split) -> the sum over splits in their order, and whether this program has it.

    The last program of a tile to come here does. Parts are [SPLITS, size] float32, counters [tiles] int32 that are
    zero before and after.
    """
    tile, split = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tl.store(parts_ptr + split * size + at, acc, mask=mask)
    tl.debug_barrier()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        acc = tl.zeros_like(acc)
        for other in tl.static_range(SPLITS):  # unrolled: all are on their way at once
            part_ptr = parts_ptr + tl.full([], other, tl.int64) * size
            acc += tl.load(part_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return acc, is_last


@triton.jit
def _tile_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    parts_ptr,  # [splits, M, N] float32, to be added up here
    counters_ptr,  # [tiles] int32, zero before and after
    x_scale_ptr,  # [M] float32
    weight_scale_ptr,  # [N] float32
    down_ptr, slots_ptr, ranks_ptr, shrunk_ptr,  # what is shrunk beside it, see shrink_beside.py
    M, N, K, k_per_split, down_lines, lines_of_one,
    RANK: tl.constexpr, SHRINKS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,  # every split is whole pieces of BK
    AGAIN: tl.constexpr,  # beyond the last token it is read again, and not stored
    IN_PARTS: tl.constexpr,  # out is [splits, M, N]
    SPLITS: tl.constexpr,
    IN_TURN: tl.constexpr,  # one program does all splits, with the same bits
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,  # pieces of the weight asked for while the kernel before still runs
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token_tiles = tl.cdiv(M, BT)
    tiles = tl.cdiv(N, BN)
    place = tl.program_id(0)
    split = tl.program_id(1)
    begin = split * k_per_split
    end = K if IN_TURN else tl.minimum(begin + k_per_split, K)
    if SHRINKS:
        beside = tl.cdiv(down_lines, BN) * token_tiles
        if place < beside:
            shrink_tile(
                x_ptr, down_ptr, slots_ptr, ranks_ptr, shrunk_ptr, place // token_tiles, place % token_tiles, split,
                M, K, begin, end, down_lines, lines_of_one, RANK, BT, BN, BK, PRECISION, PDL,
            )  # fmt: skip
            return
        place -= beside
    allow_dependents(PDL)
    # Programs that run together share weights and activations: GROUP tiles of lines at a time walk over the tokens.
    first = place // (GROUP * token_tiles) * GROUP
    group = tl.minimum(tiles - first, GROUP)
    tile = first + place % (GROUP * token_tiles) % group
    token_tile = place % (GROUP * token_tiles) // group
    tokens = token_tile * BT + tl.arange(0, BT)
    lines, outputs, width = lines_of(tile, N, BN, GATED)
    inner = tl.arange(0, BK)
    token_mask, line_mask = tokens < M, outputs < width
    w_at = weight_ptr + lines.to(tl.int64)[:, None] * K + (begin + inner)[None, :]
    x_at = x_ptr + tl.minimum(tokens, M - 1).to(tl.int64)[None, :] * K + (begin + inner)[:, None]
    if PDL:
        prefetch_lines(weight_ptr, lines, K, begin, end, N, BK, PREFETCH)
    wait_for_predecessor(PDL)
    acc, total = tl.zeros([BN, BT], tl.float32), tl.zeros([BN, BT], tl.float32)  # of this split, of those before
    for start in range(begin, end, BK):
        if IN_TURN:  # noqa: SIM102  known when it is compiled
            if start % k_per_split == 0:
                total += acc
                acc = tl.zeros_like(acc)
        if EVEN:
            w = tl.load(w_at, mask=line_mask[:, None], other=0.0)
            x = tl.load(x_at) if AGAIN else tl.load(x_at, mask=token_mask[None, :], other=0.0)
        else:
            present = start + inner < end
            w = tl.load(w_at, mask=line_mask[:, None] & present[None, :], other=0.0)
            x = tl.load(x_at, mask=token_mask[None, :] & present[:, None], other=0.0)
        if PRECISION == "halves":  # of a float32 weight's 24 bits each has 8, or 11
            for _ in tl.static_range(3):
                half = w.to(x.dtype)
                acc = tl.dot(half, x, acc)
                w -= half.to(tl.float32)
        else:
            acc = tl.dot(w, x.to(w.dtype), acc, input_precision=PRECISION)
        w_at += BK
        x_at += BK
    if IN_TURN:
        acc = total + acc
    at = tokens.to(tl.int64)[None, :] * N + lines[:, None]
    mask = token_mask[None, :] & line_mask[:, None]
    if SPLITS > 1 and not IN_PARTS and not IN_TURN:
        acc, is_last = add_splits(acc, parts_ptr, counters_ptr, M * N, at, mask, SPLITS)
        if not is_last:
            return
    if SCALED:
        x_scale = tl.load(x_scale_ptr + tokens, mask=token_mask, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + lines, mask=line_mask, other=0.0)
        acc = acc * x_scale[None, :] * weight_scale[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + lines, mask=line_mask, other=0.0).to(tl.float32)
        if IN_PARTS:  # once
            bias = tl.where(split == 0, bias, 0.0)
        acc += bias[:, None]
    if GATED:  # of what the matmul alone would be, rounded
        rounded = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(rounded, [BN // 2, 2, BT]), (0, 2, 1)))
        acc = gate_times_up(gate, up, GELU)
        outputs = tile * (BN // 2) + tl.arange(0, BN // 2)
    out_at = tokens.to(tl.int64)[:, None] * width + outputs[None, :]
    out_mask = token_mask[:, None] & (outputs < width)[None, :]
    if IN_PARTS:
        out_at += split.to(tl.int64) * M * N
    tl.store(out_ptr + out_at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True)
class TileShape:
    """How a matmul is cut. Of these only `splits` can change a bit of the result."""

    splits: int = 1  # of the inner sum, over programs
    in_turn: bool = False  # one program does all splits: for many tokens
    bt: int = 0  # tokens of a tile; 0: all of them
    bn: int = 64  # lines of the weight in a tile
    bk: int = 128  # of the inner dimension at a time
    group: int = 8  # tiles of lines that walk over the tokens together
    prefetch: int = 2  # pieces of the weight asked for while the kernel before still runs
    num_warps: int = 4
    num_stages: int = 4  # if there is room for them


_DEFAULT_SHAPE = TileShape()


def matmul_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shape: TileShape = _DEFAULT_SHAPE,
    counters: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    in_parts: bool = False,
    parts: Tensor | None = None,
    precision: str = "ieee",
    beside: Beside | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias -> [M, N], or [M, N / 2] with an activation of GATED.

    `scales` are those of x's lines [M] and of the weight's lines [N], both float32. More than one split needs
    `counters`: zeros, int32, one for each tile of lines x tokens. `in_parts`: the splits, [splits, M, N] float32;
    `parts`: where to. `precision` is that of float32 weights, to whose type x is brought; "halves": x of 16 bits is
    multiplied as it is, with three parts of the weight. `beside`: what adapters shrink x to, in as many parts.
    """
    m, k = x.shape
    n = weight.shape[0]
    splits, bn, bk = shape.splits, shape.bn, shape.bk
    bt = shape.bt or max(_MIN_TOKENS, triton.next_power_of_2(m))
    width = n if activation is None else n // 2
    if parts is None:
        kept = (splits > 1 and not shape.in_turn) or in_parts
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if kept else x
    out = parts if in_parts else torch.empty(m, width, dtype=out_dtype or x.dtype, device=x.device)
    k_per_split = triton.cdiv(triton.cdiv(k, splits), bk) * bk
    x_scale, weight_scale = (out, out) if scales is None else scales
    token_tiles = triton.cdiv(m, bt)
    programs = triton.cdiv(n, bn) * token_tiles + num_programs(beside, bn, token_tiles)
    down, slots, ranks, shrunk, down_lines, lines = beside_arguments(beside, out)
    _tile_kernel[(programs, 1 if shape.in_turn else splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        out if counters is None else counters,
        x_scale,
        weight_scale,
        down,
        slots,
        ranks,
        shrunk,
        m,
        n,
        k,
        k_per_split,
        down_lines,
        lines,
        RANK=room_of(beside),
        SHRINKS=beside is not None,
        HAS_BIAS=bias is not None,
        SCALED=scales is not None,
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
        EVEN=k % bk == 0,
        AGAIN=m < _MIN_TOKENS and k < _LONG,
        IN_PARTS=in_parts,
        SPLITS=splits,
        IN_TURN=shape.in_turn,
        BT=bt,
        BN=bn,
        BK=bk,
        GROUP=shape.group,
        PREFETCH=shape.prefetch,
        PRECISION=precision,
        num_warps=shape.num_warps,
        num_stages=stages_within(shape.num_stages, (bt * x.element_size() + bn * weight.element_size()) * bk),
        **launch_options(),
    )
    return out
