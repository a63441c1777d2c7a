"""Activations by the name a model config gives them."""

from __future__ import annotations

from quire.ops.activation import GELU_TANH_AND_MUL, SILU_AND_MUL, Gated
from quire.ops.base import Op, Target
from quire.types.errors import ModelError

GATED_ACTIVATIONS: dict[str, Op[Gated]] = {
    "silu": SILU_AND_MUL,
    "gelu_pytorch_tanh": GELU_TANH_AND_MUL,
}


def gated_activation(name: str, target: Target) -> Gated:
    """[n, 2 * width] -> [n, width]: the activation of the first half times the second half."""
    if name not in GATED_ACTIVATIONS:
        known = ", ".join(sorted(GATED_ACTIVATIONS))
        raise ModelError(f"unknown activation {name!r} in the model config; known: {known}")
    return GATED_ACTIVATIONS[name].bind(target)
