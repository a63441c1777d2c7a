"""A product with a weight whose halves are gates and what they gate, and the activation after it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.ops.activation import Gated, clamped_swiglu, gelu_tanh_and_mul, silu_and_mul
from quire.ops.base import Implementation, Op
from quire.ops.linear import generate_transposed_inputs, linear_transposed

ACTIVATIONS: dict[str, Gated] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "clamped_swiglu": clamped_swiglu,
}
GatedProduct = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [n, K] @ weight [2 * N, K].T + bias, then an activation of the first half times the second half: [n, N]."""
    return ACTIVATIONS[activation](linear_transposed(x, weight, bias))


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, str]:
    x, weight, bias = generate_transposed_inputs(seed)
    even = weight.shape[0] // 2 * 2
    return x, weight[:even], bias[:even], ("silu", "gelu_tanh")[seed % 2]


GATED_LINEAR: Op[GatedProduct] = Op(
    "gated_linear",
    gated_linear,
    generate_inputs,
    1e-3,
    (
        Implementation("triton", "triton.matmul:gated_linear", ("cuda",), varies=True),
        Implementation("triton_fixed", "triton.fixed_matmul:gated_linear", ("cuda",)),
    ),
)
