"""A matmul with a weight whose halves are gates and what they gate, and the activation after it."""

from __future__ import annotations

from torch import Tensor

from quire.ops.activation import Gated, clamped_swiglu, gelu_tanh_and_mul, silu_and_mul
from quire.ops.base import Op, triton
from quire.ops.linear import linear_transposed

ACTIVATIONS: dict[str, Gated] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "clamped_swiglu": clamped_swiglu,
}


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, K] @ weight [2 * N, K].T + bias, then an activation of the first half times the second half: [n, N]."""
    return ACTIVATIONS[activation](linear_transposed(x, weight, bias))


GATED_LINEAR = Op(gated_linear, 1e-3, triton("matmul", varies=True), triton("fixed_matmul", name="triton_fixed"))
