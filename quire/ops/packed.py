"""Matmuls with quantized weights that stay packed: a linear layer's, and those of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.kernels.packed import PackedWeight
from quire.ops.base import Op, triton
from quire.ops.gated_linear import ACTIVATIONS
from quire.ops.grouped import sparse_mlp
from quire.ops.linear import linear_transposed

PackedLinear = Callable[[Tensor, PackedWeight, Tensor | None, str], Tensor]
PackedSparseMLP = Callable[
    [Tensor, Tensor, Tensor, PackedWeight, Tensor | None, PackedWeight, Tensor | None, str, bool], Tensor
]


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


PACKED_LINEAR: Op[PackedLinear] = Op(
    "packed_linear",
    packed_linear,
    1e-4,
    (
        triton("packed_linear", "packed_mlp", varies=True),
        triton("packed_linear_fixed", "packed_mlp", name="triton_fixed"),
    ),
)
PACKED_SPARSE_MLP: Op[PackedSparseMLP] = Op(
    "packed_sparse_mlp",
    packed_sparse_mlp,
    2e-4,
    (
        triton("packed_sparse_mlp", "packed_mlp", varies=True),
        triton("packed_sparse_mlp_fixed", "packed_mlp", name="triton_fixed"),
    ),
)
