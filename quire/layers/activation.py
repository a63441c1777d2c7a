"""Activations by the name a model config gives them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.ops.activation import (
    GELU_TANH_AND_MUL,
    GELU_TANH_AND_MUL_FP8,
    SILU_AND_MUL,
    SILU_AND_MUL_FP8,
    Gated,
    GatedLines,
)
from quire.ops.base import Op, Target
from quire.ops.fp8 import Fp8Lines
from quire.types.errors import ModelError

GATED_ACTIVATIONS: dict[str, tuple[Op[Gated], Op[GatedLines]]] = {
    "silu": (SILU_AND_MUL, SILU_AND_MUL_FP8),
    "gelu_pytorch_tanh": (GELU_TANH_AND_MUL, GELU_TANH_AND_MUL_FP8),
}


def gated_activation(
    name: str, target: Target, *, takes_lines: bool = False
) -> Callable[[Tensor], Tensor | Fp8Lines]:
    """[n, 2 * width] -> [n, width]: the activation of the first half times the second half.

    `takes_lines`: whether the product that reads the result takes it as fp8, quantized in the same pass.
    """
    if name not in GATED_ACTIVATIONS:
        known = ", ".join(sorted(GATED_ACTIVATIONS))
        raise ModelError(f"unknown activation {name!r} in the model config; known: {known}")
    plain, quantized = GATED_ACTIVATIONS[name]
    if not takes_lines:
        return plain.bind(target)
    run = quantized.bind(target)
    return lambda gate_up: Fp8Lines(*run(gate_up), gate_up.dtype)
