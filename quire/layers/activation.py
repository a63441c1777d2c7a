"""Activations by the name a model config gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from quire.layers.fusion import PLAIN, Form, Forms, Passed, whole
from quire.layers.linear import Linear
from quire.ops.activation import (
    GELU_AND_MUL,
    GELU_TANH_AND_MUL,
    GELU_TANH_AND_MUL_FP8,
    SILU_AND_MUL,
    SILU_AND_MUL_FP8,
    Gated,
    GatedQuantized,
)
from quire.ops.base import Op, Target
from quire.ops.fp8 import QuantizedActivations
from quire.types.errors import ModelError

Activation = Callable[[Tensor], Passed]
MATMUL_ACTIVATIONS = ("clamped_swiglu",)  # those that are only ever computed with a matmul


class GatedOps(NamedTuple):
    """One gated activation: alone, with its result quantized, and its name in a matmul (ops/gated_linear.py)."""

    plain: Op[Gated]
    quantized: Op[GatedQuantized] | None = None  # None: there is no such op
    in_matmul: str = ""  # "": no matmul has it


GATED_ACTIVATIONS: dict[str, GatedOps] = {
    "silu": GatedOps(SILU_AND_MUL, SILU_AND_MUL_FP8, "silu"),
    "gelu": GatedOps(GELU_AND_MUL),
    "gelu_pytorch_tanh": GatedOps(GELU_TANH_AND_MUL, GELU_TANH_AND_MUL_FP8, "gelu_tanh"),
}


def gated_activation(name: str, target: Target, accepted: Forms = PLAIN) -> Activation:
    """[n, 2 * width] -> [n, width]: the activation of the first half times the second half.

    `accepted`: the forms in which the matmul that reads the result takes it.
    """
    ops = _ops(name)
    if ops.quantized is None or Form.E4M3_PER_TOKEN not in accepted:
        return ops.plain.bind(target)
    run = ops.quantized.bind(target)
    return lambda gate_up: QuantizedActivations(*run(gate_up), gate_up.dtype)


def gated_matmul(gate_up: Linear, name: str, target: Target, accepted: Forms = PLAIN) -> Callable[[Any], Passed]:
    """`gate_up` and the activation after it, as one kernel where its method has one."""
    activation, in_matmul = gated_activation(name, target, accepted), _ops(name).in_matmul
    quantizes, adapters = Form.E4M3_PER_TOKEN in accepted, gate_up.adapters

    def apart(hidden: Passed) -> Passed:
        return activation(whole(gate_up(hidden)))

    fused = None if quantizes or not in_matmul else gate_up.method.gated(in_matmul)
    if adapters is None:
        return fused or apart
    slots, alone = adapters, fused or apart

    def adapted(hidden: Passed) -> Passed:
        if quantizes or not in_matmul or not slots.gates:
            return apart(hidden)
        return slots.expand_gated(*gate_up.multiply_and_shrink(whole(hidden)), in_matmul)

    return lambda hidden: adapted(hidden) if slots.is_active else alone(hidden)


def activation_in_matmul(name: str) -> str:
    """What matmuls with an activation after them call it; see ops/gated_linear.py."""
    found = name if name in MATMUL_ACTIVATIONS else _ops(name).in_matmul
    if not found:
        known = ", ".join(sorted(key for key, ops in GATED_ACTIVATIONS.items() if ops.in_matmul))
        raise ModelError(f"unknown activation {name!r} of experts in the model config; known: {known}")
    return found


def _ops(name: str) -> GatedOps:
    if name not in GATED_ACTIVATIONS:
        known = ", ".join(sorted(GATED_ACTIVATIONS))
        raise ModelError(f"unknown activation {name!r} in the model config; known: {known}")
    return GATED_ACTIVATIONS[name]
