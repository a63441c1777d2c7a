"""Inputs of the ops in quire/ops/gated_linear.py."""

from __future__ import annotations

from torch import Tensor

from tests.ops.inputs.linear import generate_transposed_inputs


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, str]:
    x, weight, bias = generate_transposed_inputs(seed)
    even = weight.shape[0] // 2 * 2
    return x, weight[:even], bias[:even], ("silu", "gelu_tanh")[seed % 2]


INPUTS = {"gated_linear": generate_inputs}
