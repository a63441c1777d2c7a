"""The two grouped matmuls of a sparse MLP, and matmuls with quantized weights that stay packed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.packed import PackedWeight
from quire.ops.base import Op, native, triton, triton_pair
from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.invariance import MatmulRecipe
from quire.ops.linear import linear_transposed

SharedExpert = tuple[Tensor, Tensor]
"""Matrices [2 * width, h] and [h, width] of an expert that all tokens have, with a weight of 1."""

# Always the same number of rows at once, so that a row's bits do not depend on how many share its expert.
_TILES = MatmulRecipe(min_rows=32, row_tile=32)


def grouped_gate_up(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, h], expert_ids [n, k] int32, weight [experts, 2 * f, h], bias [experts, 2 * f] -> [n, k, f] in x's type.

    Slot j of token i is activation(x[i] @ weight[e].T + bias[e]) with e = expert_ids[i, j]: the first half of the
    outputs gates the second, as in `gated_linear`.
    """
    k = expert_ids.shape[1]
    gate_up = _grouped(x.repeat_interleave(k, 0), expert_ids, weight, bias)
    return ACTIVATIONS[activation](gate_up).view(x.shape[0], k, -1)


def grouped_down(a: Tensor, expert_ids: Tensor, weights: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """a [n, k, f], expert_ids [n, k], weights [n, k] float32, weight [experts, h, f], bias [experts, h] -> [n, h].

    The sum over slots j of (a[i, j] @ weight[e].T + bias[e]) * weights[i, j], in float32 and from the first slot to
    the last, then rounded to a's type.
    """
    n, k, f = a.shape
    out = _grouped(a.reshape(n * k, f), expert_ids, weight, bias).view(n, k, -1).float() * weights.unsqueeze(-1)
    total = out[:, 0]
    for slot in range(1, k):
        total = total + out[:, slot]
    return total.to(a.dtype)


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
    """Both grouped matmuls, and a shared expert beside them: x [n, h], expert_ids and weights [n, k] -> [1, n, h].

    The result is in x's type. `in_parts`: may also be [parts, n, h] float32, the slots of each token, weighted, and
    then the shared expert, for the reader to add up from the first to the last.
    """
    a = grouped_gate_up(x, expert_ids, gate_up, gate_up_bias, activation)
    out = grouped_down(a, expert_ids, weights, down, down_bias)
    if shared is not None:
        both = linear_transposed(x, shared[0], None, _TILES)
        out = add_shared(out, linear_transposed(ACTIVATIONS[activation](both), shared[1], None, _TILES), None)
    return out.unsqueeze(0)


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
    """routed + shared, both [n, h]; with gate [n, 1] routed + sigmoid(gate) * shared. Float32 inside."""
    wide = shared.float()
    if gate is not None:
        wide = wide / (1.0 + (-gate.float()).exp())
    return (routed.float() + wide).to(routed.dtype)


def _grouped(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Row i of x [n * k, in] times the matrix of expert_ids.flatten()[i]: [n * k, out]."""
    flat = expert_ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=weight.shape[0]).tolist()
    out, start = x.new_zeros(x.shape[0], weight.shape[1]), 0
    for expert, count in enumerate(counts):
        if count:
            rows = order[start : start + count]
            out[rows] = linear_transposed(x[rows], weight[expert], None if bias is None else bias[expert], _TILES)
        start += count
    return out


GROUPED_GATE_UP = Op(grouped_gate_up, 1e-4, triton("sparse_mlp"))
GROUPED_DOWN = Op(grouped_down, 1e-4, triton("sparse_mlp"))
SPARSE_MLP = Op(sparse_mlp, 2e-4, *triton_pair("sparse_mlp"))
ADD_SHARED = Op(add_shared, 1e-5, triton("add_shared"), native("grouped"))


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, K] @ weight [1, N, K].T + bias [N] -> [n, N], the weight rounded to x's type.

    With an activation ("": none) as `gated_linear`: [n, N / 2].
    """
    out = linear_transposed(x, weight.unpacked()[0].to(x.dtype), bias)
    return ACTIVATIONS[activation](out) if activation else out


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
    """`sparse_mlp` with the experts' weights packed."""
    dense_gate_up, dense_down = gate_up.unpacked().to(x.dtype), down.unpacked().to(x.dtype)
    return sparse_mlp(
        x, expert_ids, weights, dense_gate_up, gate_up_bias, dense_down, down_bias, activation, in_parts
    )


PACKED_LINEAR = Op(packed_linear, 1e-4, *triton_pair("packed_mlp"))
PACKED_SPARSE_MLP = Op(packed_sparse_mlp, 2e-4, *triton_pair("packed_mlp"))
