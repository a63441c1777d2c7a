"""The sparse MLP of a mixture of experts: which kernels for how many tokens.

One token uses multiply-and-add with the lines of its experts. A few are sorted by expert, so that each expert's
matrices are read once; of many what is between the two matmuls lies in the order of their experts. A shared expert of
few tokens is one part more of what the next kernel adds up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton import fixed_matmul, matmul
from quire.kernels.triton.add_shared import add_shared
from quire.kernels.triton.expert_slots import sort_slots
from quire.kernels.triton.grouped_configs import shapes_for
from quire.kernels.triton.grouped_matmul import SharedLines, add_slots, grouped_one_row, grouped_tiles
from quire.kernels.triton.grouped_sorted import grouped_sorted, sorted_fits
from quire.kernels.triton.tile_matmul import matmul_tiles

_MAX_ROWS_ALONE = 2
_MAX_ROWS_APART = 256  # whose slots are left to the next kernel to add up
# Slots an expert has on average, by which it is chosen how tiles are cut.
FEW = 8
SOME = 64

SharedExpert = tuple[Tensor, Tensor]  # see quire/ops/grouped.py


def sparse_mlp(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
    shared: SharedExpert | None = None,
) -> Tensor:
    """x [n, h], expert_ids and weights [n, k] -> [1, n, h] in x's type, or `in_parts` [parts, n, h] float32."""
    n, k = expert_ids.shape
    given = (x, expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation)
    if 0 < n <= _MAX_ROWS_ALONE and (in_parts or shared is None):
        return _few(*given, in_parts, shared)
    if shared is None:
        return _in_tiles(*given, in_parts)
    if not in_parts or n > _MAX_ROWS_APART or n * k > SOME * gate_up.shape[0]:
        both = matmul.gated_linear(x, shared[0], None, activation)
        return add_shared(_in_tiles(*given, False)[0], matmul.linear_transposed(both, shared[1]), None)[None]
    shape = matmul.split_k_shape(n, shared[1])
    parts = torch.empty(k + shape.splits, n, x.shape[1], dtype=torch.float32, device=x.device)
    both = matmul.gated_linear(x, shared[0], None, activation)
    matmul_tiles(both, shared[1], shape=shape, in_parts=True, parts=parts[k:])
    _in_tiles(*given, True, out=parts[:k])
    return parts


def _few(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
    shared: SharedExpert | None,
) -> Tensor:
    """Of one or two tokens, each with its own programs; the shared expert's are in the same launches."""
    n, k = expert_ids.shape
    first = second = out = None
    if shared is not None:
        out = torch.empty(k + 1, n, x.shape[1], dtype=torch.float32, device=x.device)
        between = torch.empty(n, shared[1].shape[1], dtype=x.dtype, device=x.device)
        first, second = SharedLines(x, shared[0], between), SharedLines(between, shared[1], out[k])
    cols = 1024 if x.shape[1] >= 1024 else 256
    a = grouped_one_row(x, expert_ids, gate_up, gate_up_bias, k, activation, lines=16, cols=cols, shared=first)
    weighted = weights if in_parts else None
    lines, cols = (4, 512) if a.shape[1] >= 1024 else (4, 256) if a.shape[1] > 512 else (8, 256)
    y = grouped_one_row(
        a, expert_ids, down, down_bias, 1, lines=lines, cols=cols, weights=weighted, out=out, shared=second
    )
    return y if in_parts else add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def sparse_mlp_fixed(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
    shared: SharedExpert | None = None,
) -> Tensor:
    """The same, every sum in one order for any number of tokens: never in parts, which only few tokens could be."""
    routed = _in_tiles(x, expert_ids, weights, gate_up, gate_up_bias, down, down_bias, activation, in_parts=False)
    if shared is None:
        return routed
    both = fixed_matmul.gated_linear(x, shared[0], None, activation)
    return add_shared(routed[0], fixed_matmul.linear_transposed(both, shared[1]), None)[None]


def _in_tiles(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    in_parts: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Of any number of tokens, sorted by expert. Few tokens may be left in parts, which go to `out` if given."""
    n, k = expert_ids.shape
    num_experts = gate_up.shape[0]
    if n == 0:
        return x.new_empty(1, 0, down.shape[1])
    mean = n * k / num_experts
    shapes = shapes_for(num_experts, down.shape[2], x.dtype)
    if mean <= SOME or not sorted_fits(x, gate_up, down):
        shape = shapes.few if mean <= FEW else shapes.some if mean <= SOME else shapes.many
        slots = sort_slots(expert_ids, num_experts, shape.bt)
        a = grouped_tiles(x, slots, gate_up, gate_up_bias, k, shape, activation)
        if in_parts and n <= _MAX_ROWS_APART:
            return grouped_tiles(a, slots, down, down_bias, 1, shape, weights=weights, out=out)
        y = grouped_tiles(a, slots, down, down_bias, 1, shape)
    else:
        slots = sort_slots(expert_ids, num_experts, shapes.sorted.bt)
        a = grouped_sorted(x, slots, gate_up, gate_up_bias, shapes.sorted_gated, activation, per_row=k)
        y = grouped_sorted(a, slots, down, down_bias, shapes.sorted, scatter=True)
    return add_slots(y.view(n, k, -1), weights).unsqueeze(0)


def grouped_gate_up(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The first of the two matmuls by itself, in the same order: [n, k, f]."""
    n, k = expert_ids.shape
    width = weight.shape[1] // 2
    return _tiled(x, expert_ids, weight, bias, width, k, activation).view(n, k, width)


def grouped_down(a: Tensor, expert_ids: Tensor, weights: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The second: a [n, k, f] -> [n, h]."""
    n, k, width = a.shape
    return add_slots(_tiled(a.flatten(0, 1), expert_ids, weight, bias, width, 1).view(n, k, -1), weights)


def _tiled(
    x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None, width: int, per_row: int, activation: str = ""
) -> Tensor:
    """Line s // per_row of x times the matrix of slot s's expert: [n * k, outputs]."""
    num_experts, outputs, _ = weight.shape
    if x.shape[0] == 0:
        return x.new_empty(0, outputs // 2 if activation else outputs)
    mean, shapes = expert_ids.numel() / num_experts, shapes_for(num_experts, width, x.dtype)
    shape = shapes.few if mean <= FEW else shapes.some if mean <= SOME else shapes.many
    slots = sort_slots(expert_ids, num_experts, shape.bt)
    return grouped_tiles(x.contiguous(), slots, weight, bias, per_row, shape, activation)
