"""Activations by the name a model config gives them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.ops.activation import gelu_tanh_and_mul, silu_and_mul
from quire.types.errors import ModelError

GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """[n, 2 * width] -> [n, width]: the activation of the first half times the second half."""
    if name not in GATED_ACTIVATIONS:
        known = ", ".join(sorted(GATED_ACTIVATIONS))
        raise ModelError(f"unknown activation {name!r} in the model config; known: {known}")
    return GATED_ACTIVATIONS[name]
