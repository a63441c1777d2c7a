"""Inputs of the ops in quire/ops/activation.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = 4 + seed % 13, 2 * (3 + seed % 37)
    return (torch.randn(rows, width, generator=generator) * 8.0,)


INPUTS = {
    "silu_and_mul": generate_inputs,
    "gelu_tanh_and_mul": generate_inputs,
    "silu_and_mul_fp8": generate_inputs,
    "gelu_tanh_and_mul_fp8": generate_inputs,
    "gelu": generate_inputs,
    "gelu_tanh": generate_inputs,
    "relu": generate_inputs,
    "gelu_and_mul": generate_inputs,
}
