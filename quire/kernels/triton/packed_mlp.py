"""Linear layers and experts with packed weights: which kernels for how many tokens.

All shapes of tiles have the same pieces of the inner dimension, so that a token's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.packed import PackedWeight
from quire.kernels.triton.activation import GATED
from quire.kernels.triton.expert_slots import sort_slots
from quire.kernels.triton.grouped_matmul import GroupedShape, add_slots
from quire.kernels.triton.launch import multiprocessors
from quire.kernels.triton.packed_matmul import packed_tiles, unpack

MAX_ROWS_PACKED = 256  # more are multiplied by what the weight stands for, with the library's matmul
_PIECE = 128
_MAX_FEW_ROWS = 16
_MAX_SOME_ROWS = 64
_MAX_ROWS_APART = 256  # whose slots are left to the next kernel to add up
# Slots that an expert has on average, and how tiles are cut then.
_FEW = 8
_SOME = 64
_FEW_SHAPE = GroupedShape(16, 64, _PIECE, 4, 4)
_SOME_SHAPE = GroupedShape(32, 64, _PIECE, 4, 4)
_MANY_SHAPE = GroupedShape(128, 128, _PIECE, 8, 3)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, K], weight [1, N, K], bias [N] -> [n, N] in x's type, or with a gated activation [n, N / 2]."""
    if x.shape[0] <= MAX_ROWS_PACKED or (activation and activation not in GATED):
        return packed_linear_fixed(x, weight, bias, activation)
    out = torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)
    return GATED[activation](out) if activation else out


def packed_linear_fixed(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """The same, every inner sum in one order for any number of rows."""
    rows, (_, n, _) = x.shape[0], weight.sizes
    if rows == 0:
        return x.new_empty(0, n // 2 if activation else n)
    if rows <= _MAX_FEW_ROWS:
        lines = _few_lines(n)
        shape = GroupedShape(16, lines, _PIECE, lines // 16, 4)
    elif rows <= _MAX_SOME_ROWS:
        shape = GroupedShape(int(triton.next_power_of_2(rows)), 64, _PIECE, 4, 4)
    else:
        shape = _MANY_SHAPE
    return packed_tiles(x.contiguous(), None, weight, bias, 1, shape, activation)


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
    num_experts, hidden, _ = down.sizes
    if n == 0:
        return x.new_empty(1, 0, hidden)
    mean = n * k / num_experts
    shape = _FEW_SHAPE if mean <= _FEW else _SOME_SHAPE if mean <= _SOME else _MANY_SHAPE
    slots = sort_slots(expert_ids, num_experts, shape.bt)
    a = packed_tiles(x.contiguous(), slots, gate_up, gate_up_bias, k, shape, activation)
    if in_parts and n <= _MAX_ROWS_APART:
        return packed_tiles(a, slots, down, down_bias, 1, shape, weights=weights)
    y = packed_tiles(a, slots, down, down_bias, 1, shape)
    return add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def _few_lines(n: int) -> int:
    """Lines of a tile, so that there are programs for all multiprocessors."""
    return next((lines for lines in (64, 32) if triton.cdiv(n, lines) >= 2 * multiprocessors()), 16)
