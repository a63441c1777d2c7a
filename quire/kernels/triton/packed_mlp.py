"""Linear layers and experts with packed weights: which kernels for how many tokens, by benchmarks/packed_gpu.py.

All shapes of tiles have the same pieces of the inner dimension. Where splits of it depend on the shape of the weight
alone (`_fixed`), a token's bits do not depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.packed import PackedWeight
from quire.kernels.triton.activation import GATED
from quire.kernels.triton.expert_slots import sort_slots
from quire.kernels.triton.grouped_matmul import GroupedShape, add_slots
from quire.kernels.triton.launch import multiprocessors
from quire.kernels.triton.packed_matmul import packed_tiles, unpack

MAX_ROWS_PACKED = 128  # more are multiplied by what the weight stands for, with the library's matmul
_PIECE = 128
_MAX_FEW_ROWS = 16
_MAX_ROWS_APART = 256  # whose slots are left to the next kernel to add up
_MAX_FEW_SLOTS = 16  # that leave multiprocessors without work
_MOST_SPLITS = 8
# Up to how many slots an expert has on average, and how tiles are cut then.
_SHAPES = (
    (4, GroupedShape(16, 64, _PIECE, 2, 4)),
    (16, GroupedShape(32, 64, _PIECE, 4, 4)),
    (64, GroupedShape(64, 128, _PIECE, 4, 4)),
)
_MANY_SHAPE = GroupedShape(128, 128, _PIECE, 8, 3)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, K], weight [1, N, K], bias [N] -> [n, N] in x's type, or with a gated activation [n, N / 2]."""
    rows, (_, n, k) = x.shape[0], weight.sizes
    if rows <= MAX_ROWS_PACKED or (activation and activation not in GATED):
        programs = 4 if rows <= _MAX_FEW_ROWS else 2
        return _linear(x, weight, bias, activation, splits_of(n, k, programs * multiprocessors()))
    out = torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)
    return GATED[activation](out) if activation else out


def packed_linear_fixed(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """The same, every inner sum in one order for any number of rows."""
    _, n, k = weight.sizes
    return _linear(x, weight, bias, activation, splits_of(n, k, 2 * multiprocessors()))


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str, splits: int) -> Tensor:
    rows, (_, n, _) = x.shape[0], weight.sizes
    if rows == 0:
        return x.new_empty(0, n // 2 if activation else n)
    if rows <= _MAX_FEW_ROWS:
        shape = GroupedShape(16, 128, _PIECE, 4, 4)
    elif rows <= MAX_ROWS_PACKED:
        shape = GroupedShape(32 if rows <= 32 else 64, 128, _PIECE, 8, 4)
    else:
        shape = _MANY_SHAPE
    return packed_tiles(x.contiguous(), None, weight, bias, 1, shape, activation, splits=splits)


def splits_of(n: int, k: int, programs: int) -> int:
    """Of the inner sum of a weight [n, k], so that there are about that number of programs of 128 lines."""
    wanted = max(1, programs // triton.cdiv(n, 128))
    return int(1 << min(wanted, _MOST_SPLITS, max(1, k // _PIECE)).bit_length() - 1)


def packed_sparse_mlp(x: Tensor, expert_ids: Tensor, *others: Any) -> Tensor:
    """x [n, h], expert_ids and weights [n, k] -> [1, n, h] in x's type, or `in_parts` [k, n, h] float32."""
    splits = (2, 4) if expert_ids.numel() <= _MAX_FEW_SLOTS else (1, 1)
    return packed_sparse_mlp_fixed(x, expert_ids, *others, splits=splits)


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
    *,
    splits: tuple[int, int] = (1, 1),
) -> Tensor:
    """The same, every inner sum in one order for any number of tokens that has the same splits."""
    n, k = expert_ids.shape
    num_experts, hidden, _ = down.sizes
    if n == 0:
        return x.new_empty(1, 0, hidden)
    shape = next((shape for most, shape in _SHAPES if n * k <= most * num_experts), _MANY_SHAPE)
    slots = sort_slots(expert_ids, num_experts, shape.bt)
    a = packed_tiles(x.contiguous(), slots, gate_up, gate_up_bias, k, shape, activation, splits=splits[0])
    if in_parts and n <= _MAX_ROWS_APART:
        return packed_tiles(a, slots, down, down_bias, 1, shape, weights=weights, splits=splits[1])
    y = packed_tiles(a, slots, down, down_bias, 1, shape, splits=splits[1])
    return add_slots(y.view(n, k, -1), weights).unsqueeze(0)
