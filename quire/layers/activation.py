"""Activations by the name a model config gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from quire.layers.linear import Linear
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

Activation = Callable[[Tensor], Tensor | Fp8Lines]


class GatedOps(NamedTuple):
    """One gated activation: alone, with its result quantized, and its name in a product (ops/gated_linear.py)."""

    plain: Op[Gated]
    lines: Op[GatedLines]
    in_product: str


GATED_ACTIVATIONS: dict[str, GatedOps] = {
    "silu": GatedOps(SILU_AND_MUL, SILU_AND_MUL_FP8, "silu"),
    "gelu_pytorch_tanh": GatedOps(GELU_TANH_AND_MUL, GELU_TANH_AND_MUL_FP8, "gelu_tanh"),
}


def gated_activation(name: str, target: Target, *, takes_lines: bool = False) -> Activation:
    """[n, 2 * width] -> [n, width]: the activation of the first half times the second half.

    `takes_lines`: whether the product that reads the result takes it as fp8, quantized in the same pass.
    """
    ops = _ops(name)
    if not takes_lines:
        return ops.plain.bind(target)
    run = ops.lines.bind(target)
    return lambda gate_up: Fp8Lines(*run(gate_up), gate_up.dtype)


def gated_product(
    gate_up: Linear, name: str, target: Target, *, takes_lines: bool = False
) -> Callable[[Any], Tensor | Fp8Lines]:
    """`gate_up` and the activation after it, of whatever `gate_up` takes: as one where it knows how."""
    activation = gated_activation(name, target, takes_lines=takes_lines)
    at_once = None if takes_lines else gate_up.method.gated(_ops(name).in_product)
    return at_once or (lambda hidden: activation(gate_up(hidden)))


def _ops(name: str) -> GatedOps:
    if name not in GATED_ACTIVATIONS:
        known = ", ".join(sorted(GATED_ACTIVATIONS))
        raise ModelError(f"unknown activation {name!r} in the model config; known: {known}")
    return GATED_ACTIVATIONS[name]
