"""Linear layers and experts with packed weights: which kernels for how many tokens, by benchmarks/packed_gpu.py.

In the fixed ones all shapes of tiles have the same pieces of the inner dimension, and splits of it depend on the
shape of the weight alone, so that a token's bits do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.kernels.packed import FIXED_ROWS, MANY_SLOTS, PIECE, PackedWeight, lines_of, splits_of
from quire.kernels.triton.activation import GATED
from quire.kernels.triton.expert_slots import sort_slots
from quire.kernels.triton.gather import gather_rows
from quire.kernels.triton.grouped_configs import shapes_for
from quire.kernels.triton.grouped_matmul import GroupedShape, add_slots
from quire.kernels.triton.grouped_sorted import grouped_sorted, sorted_fits
from quire.kernels.triton.launch import multiprocessors
from quire.kernels.triton.packed_fragments import MAX_TOKENS, fragments_fit, packed_fragments
from quire.kernels.triton.packed_matmul import _kind, packed_tiles, unpack
from quire.kernels.triton.packed_rows import packed_rows
from quire.kernels.triton.packed_wide import ALIGNMENT, packed_wide, wide_fits
from quire.kernels.triton.self_check import agrees

MAX_ROWS_PACKED = 128  # more are multiplied by what the weight stands for, with the library's matmul
_MAX_ROWS_WIDE = 256  # the same of copied tiles
_MAX_FEW_ROWS = 16
_MAX_LINES_ALONE = 8192  # of a matrix that one row multiplies without matrix instructions
_MAX_FEW_COLUMNS = 2048  # of experts' bytes, of which a program has 32 lines
_MAX_ROWS_APART = 256  # whose slots are left to the next kernel to add up
_MAX_FEW_SLOTS = 16  # that leave multiprocessors without work
# Up to how many slots an expert has on average, and how tiles are cut then.
_SHAPES = (
    (4, GroupedShape(16, 64, PIECE, 2, 4)),
    (16, GroupedShape(32, 64, PIECE, 4, 4)),
    (64, GroupedShape(64, 128, PIECE, 4, 4)),
)
_MANY_SHAPE = GroupedShape(128, 128, PIECE, 8, 3)
_FEW_BYTES_SHAPE = GroupedShape(16, 32, PIECE, 2, 3)  # of bytes and few slots
# The same of copied tiles.
_WIDE_SHAPES = (
    (16, GroupedShape(16, 64, 64, 4, 6)),
    (32, GroupedShape(32, 64, 64, 4, 4)),
    (64, GroupedShape(64, 128, 64, 8, 4)),
)
_WIDE_MANY_SHAPE = GroupedShape(128, 128, 64, 8, 3)
_SCALED_SHAPE = GroupedShape(128, 64, PIECE, 4, 3)  # of one matrix and more than MAX_ROWS_PACKED rows
# The same of bytes, with an activation and without: two warps have the smaller matrix instructions, whose operands
# are read as words of four; those of four warps are read by two bytes, which more slots make up for.
_BYTE_SHAPES = (
    (8, GroupedShape(16, 32, PIECE, 2, 4), GroupedShape(16, 64, PIECE, 2, 4)),
    (24, GroupedShape(32, 64, PIECE, 2, 4), GroupedShape(32, 64, PIECE, 2, 4)),
)
_BYTE_MANY_SHAPE = GroupedShape(64, 64, PIECE, 4, 3)


class _Experts(NamedTuple):
    """What packed_sparse_mlp is given beside its tokens."""

    expert_ids: Tensor
    weights: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    activation: str
    in_parts: bool


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, K], weight [1, N, K], bias [N] -> [n, N] in x's type, or with a gated activation [n, N / 2]."""
    rows, (_, n, k) = x.shape[0], weight.sizes
    most = _MAX_ROWS_WIDE if wide_fits(x, weight) else MAX_ROWS_PACKED
    if rows > most and (not activation or activation in GATED):
        out = torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)
        return GATED[activation](out) if activation else out
    fast: Callable[..., Tensor] | None = None
    if rows == 1 and not weight.has_bytes and fragments_fit(x, weight):
        fast = _linear_of_fragments
    elif rows == 1 and n <= _MAX_LINES_ALONE and not weight.is_fine:
        fast = _linear_of_one_row
    elif 1 < rows <= _MAX_ROWS_WIDE and wide_fits(x, weight):
        fast = _wide_linear
    if fast is not None and agrees(
        (fast.__name__, _kind(weight), weight.group, activation, x.dtype),
        x,
        lambda x: fast(x, weight, bias, activation),
        lambda x: _linear(x, weight, bias, activation, splits_of(n, k)),
    ):
        return fast(x, weight, bias, activation)
    programs = 4 if rows <= _MAX_FEW_ROWS else 2
    return _linear(x, weight, bias, activation, splits_of(n, k, programs * multiprocessors()))


def _linear_of_fragments(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, splits: int | None = None
) -> Tensor:
    return packed_fragments(x.contiguous(), None, weight, bias, activation, splits=splits)


def _linear_of_one_row(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    few = weight.sizes[1] <= _MAX_LINES_ALONE // 2
    block, splits = (64, 2) if few and not weight.has_bytes else (128, 1)
    return packed_rows(x.contiguous(), None, weight, bias, activation, block=block, splits=splits)


def _wide_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """Weights of many rows are scaled instead of sums where that is faster: it is less exact, as unpacking is."""
    _, n, k = weight.sizes
    is_many = x.shape[0] > MAX_ROWS_PACKED
    if not is_many or weight.has_bytes:
        return _wide(x, weight, bias, activation, max(1, splits_of(n, k) // (1 + is_many)))
    num_programs = triton.cdiv(x.shape[0], _SCALED_SHAPE.bt) * triton.cdiv(n, _SCALED_SHAPE.bn)
    paired = num_programs <= multiprocessors()  # else more programs take turns
    how = {"in_sums": not (activation or paired), "paired": paired}
    return packed_wide(x.contiguous(), None, weight, bias, _SCALED_SHAPE, activation, **how)


def _wide(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, splits: int) -> Tensor:
    bt = min(128 if activation else 256, max(16, int(triton.next_power_of_2(x.shape[0]))))
    lines = 64 if activation or bt > 128 else lines_of(weight.sizes[1])
    shape = GroupedShape(bt, lines, PIECE, 4 if bt <= 64 else 8, 4)
    return packed_wide(x.contiguous(), None, weight, bias, shape, activation, splits=splits)


def packed_linear_fixed(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """The same, every inner sum in one order for any number of rows."""
    _, n, k = weight.sizes
    given, splits, x = (weight, bias, activation), splits_of(n, k), _aligned(x)
    run: Callable[..., Tensor] = partial(_linear, fixed=True)
    key = _kind(weight), weight.group, activation, x.dtype
    is_wide = (
        x.shape[0] > 0
        and wide_fits(x, weight)
        and agrees(
            (_wide.__name__, *key),
            x[:MAX_ROWS_PACKED],
            lambda x: _wide(x, *given, splits),
            lambda x: _linear(x, *given, splits),
        )
    )
    if is_wide:
        run = _wide
    if is_wide and x.shape[0] <= MAX_TOKENS and fragments_fit(x, weight):
        few = partial(_linear_of_fragments, weight=weight, bias=bias, activation=activation, splits=splits)
        name = (_linear_of_fragments.__name__, *key, weight.sizes)  # bits are promised, so each shape is compared
        if agrees(name, x, few, lambda x: run(x, *given, splits), exactly=True):
            return few(x)
    if splits == 1 or x.shape[0] <= FIXED_ROWS:
        return run(x, *given, splits)
    return torch.cat([run(_aligned(rows), *given, splits) for rows in x.split(FIXED_ROWS)])


def _aligned(x: Tensor) -> Tensor:
    """x where copies of tiles can begin: whether they can is not to decide about bits."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, splits: int, fixed: bool = False
) -> Tensor:
    rows, (_, n, _) = x.shape[0], weight.sizes
    if rows == 0:
        return x.new_empty(0, n // 2 if activation else n)
    if rows <= _MAX_FEW_ROWS:
        shape = _FEW_BYTES_SHAPE if weight.has_bytes else GroupedShape(16, 128, PIECE, 4, 4)
    elif rows <= MAX_ROWS_PACKED:
        shape = GroupedShape(32 if rows <= 32 else 64, 128, PIECE, 8, 4)
    else:
        shape = _MANY_SHAPE
    shape = _of_four_warps(shape) if fixed else shape
    return packed_tiles(x.contiguous(), None, weight, bias, 1, shape, activation, splits=splits)


def _of_four_warps(shape: GroupedShape) -> GroupedShape:
    """A shape whose tiles have the matrix instructions of larger ones.

    Two warps have others, for which the compiler puts columns of bytes together that are not side by side: a sum in
    another order.
    """
    return shape if shape.num_warps >= 4 else replace(shape, bn=max(shape.bn, 64), num_warps=4)


def packed_sparse_mlp(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: PackedWeight,
    gate_up_bias: Tensor | None,
    down: PackedWeight,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
) -> Tensor:
    """x [n, h], expert_ids and weights [n, k] -> [1, n, h] in x's type, or `in_parts` [k, n, h] float32."""
    n, k = expert_ids.shape
    num_experts, _, _ = down.sizes
    given = _Experts(expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts)
    fast = None
    if n * k >= MANY_SLOTS * num_experts and sorted_fits(x):
        return _unpacked_sparse_mlp(x, given)
    if 0 < n * k <= _MAX_FEW_SLOTS and not gate_up.is_fine and not down.is_fine:
        fast = _sparse_mlp_of_few_slots
    elif n > 0 and wide_fits(x, gate_up, down):
        fast = _wide_sparse_mlp
    if fast is not None and agrees(
        (fast.__name__, _kind(gate_up), gate_up.group, activation, x.dtype, in_parts),
        x,
        lambda x: _sum_of(fast(x, given)),
        lambda x: _sum_of(_sparse_mlp_in_tiles(x, given)),
    ):
        return fast(x, given)
    return _sparse_mlp_in_tiles(x.contiguous(), given)


def _sum_of(parts: Tensor) -> Tensor:
    return parts.float().sum(0)


def _unpacked_sparse_mlp(x: Tensor, of: _Experts) -> Tensor:
    expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, _ = of
    n, k = expert_ids.shape
    shapes = shapes_for(down.sizes[0], down.sizes[2], x.dtype)
    slots = sort_slots(expert_ids, down.sizes[0], shapes.sorted.bt)
    dense = unpack(gate_up, x.dtype).view(gate_up.sizes)
    a = grouped_sorted(x.contiguous(), slots, dense, gate_up_bias, shapes.sorted_gated, activation, per_row=k)
    del dense  # before the other: the ledger has room for one
    y = grouped_sorted(a, slots, unpack(down, x.dtype).view(down.sizes), down_bias, shapes.sorted, scatter=True)
    return add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def _sparse_mlp_of_few_slots(x: Tensor, of: _Experts) -> Tensor:
    expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts = of
    n, k = expert_ids.shape
    multiply: Callable[..., Tensor] = packed_rows
    if gate_up.has_bytes and down.has_bytes and max(gate_up.sizes[2], down.sizes[2]) <= _MAX_FEW_COLUMNS:
        multiply = partial(packed_rows, lines=32)
    if not (gate_up.has_bytes or down.has_bytes) and fragments_fit(x, gate_up, down):
        multiply = packed_fragments
    a = multiply(x.contiguous(), expert_ids, gate_up, gate_up_bias, activation, per_row=k)
    y = multiply(a, expert_ids, down, down_bias, weights=weights if in_parts else None)
    return y if in_parts else add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def _wide_sparse_mlp(x: Tensor, of: _Experts, fixed: bool = False) -> Tensor:
    expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts = of
    n, k = expert_ids.shape
    in_parts = in_parts and n <= _MAX_ROWS_APART
    num_experts = down.sizes[0]
    if gate_up.has_bytes and down.has_bytes:
        gated, shape = _byte_shapes(n * k, num_experts)
        gated, shape = (_of_four_warps(gated), _of_four_warps(shape)) if fixed else (gated, shape)
    else:
        shape = next((shape for most, shape in _WIDE_SHAPES if n * k <= most * num_experts), _WIDE_MANY_SHAPE)
        gated = shape
    slots = sort_slots(expert_ids, num_experts, shape.bt)
    a = packed_wide(gather_rows(x.contiguous(), slots.order, k), slots, gate_up, gate_up_bias, gated, activation)
    y = packed_wide(a, slots, down, down_bias, shape, weights=weights if in_parts else None, scatter=True)
    return y if in_parts else add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def _byte_shapes(num_slots: int, num_experts: int) -> tuple[GroupedShape, GroupedShape]:
    """Tiles of gate and up, and of down."""
    for most, gated, shape in _BYTE_SHAPES:
        if num_slots <= most * num_experts:
            return gated, shape
    return _BYTE_MANY_SHAPE, _BYTE_MANY_SHAPE


def _sparse_mlp_in_tiles(x: Tensor, of: _Experts, fixed: bool = False) -> Tensor:
    expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts = of
    n, k = expert_ids.shape
    num_experts, hidden, _ = down.sizes
    if n == 0:
        return x.new_empty(1, 0, hidden)
    shape = next((shape for most, shape in _SHAPES if n * k <= most * num_experts), _MANY_SHAPE)
    if n * k <= _MAX_FEW_SLOTS and gate_up.has_bytes and down.has_bytes:
        shape = _FEW_BYTES_SHAPE
    shape = _of_four_warps(shape) if fixed else shape
    slots = sort_slots(expert_ids, num_experts, shape.bt)
    a = packed_tiles(x, slots, gate_up, gate_up_bias, k, shape, activation)
    if in_parts and n <= _MAX_ROWS_APART:
        return packed_tiles(a, slots, down, down_bias, 1, shape, weights=weights)
    y = packed_tiles(a, slots, down, down_bias, 1, shape)
    return add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def packed_sparse_mlp_fixed(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: PackedWeight,
    gate_up_bias: Tensor | None,
    down: PackedWeight,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
) -> Tensor:
    """The same, every sum in one order for any number of tokens: never in parts, which only few tokens could be."""
    of = _Experts(expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts=False)
    x, few = _aligned(x), of._replace(expert_ids=expert_ids[:MAX_ROWS_PACKED], weights=weights[:MAX_ROWS_PACKED])
    key = (_kind(gate_up), gate_up.group, activation, x.dtype)
    is_wide = (
        x.shape[0] > 0
        and gate_up.has_bytes == down.has_bytes
        and wide_fits(x, gate_up, down)
        and agrees(
            (_wide_sparse_mlp.__name__, *key, False),
            x[:MAX_ROWS_PACKED],
            lambda x: _sum_of(_wide_sparse_mlp(x, few)),
            lambda x: _sum_of(_sparse_mlp_in_tiles(x, few)),
        )
    )
    run = partial(_wide_sparse_mlp if is_wide else _sparse_mlp_in_tiles, of=of, fixed=True)
    if is_wide and expert_ids.numel() <= _MAX_FEW_SLOTS and fragments_fit(x, gate_up, down):
        name = (_few_slots_fixed.__name__, *key, gate_up.sizes, down.sizes)
        if agrees(name, x, lambda x: _few_slots_fixed(x, of)[0], lambda x: run(x)[0], exactly=True):
            return _few_slots_fixed(x, of)
    return run(x)


def _few_slots_fixed(x: Tensor, of: _Experts) -> Tensor:
    n, k = of.expert_ids.shape
    columns = PIECE if of.down.has_bytes else _WIDE_MANY_SHAPE.bk
    multiply = partial(packed_fragments, columns=columns, splits=1)
    a = multiply(x, of.expert_ids, of.gate_up, of.gate_up_bias, of.activation, per_row=k)
    y = multiply(a, of.expert_ids, of.down, of.down_bias)
    return add_slots(y.view(n, k, -1), of.weights).unsqueeze(0)
