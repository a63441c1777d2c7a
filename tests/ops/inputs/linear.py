"""Inputs of the ops in quire/ops/linear.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = generate_transposed_inputs(seed)
    return x, weight.t().contiguous(), bias


def generate_transposed_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, inner, outputs = (1, 2, 5, 16, 17, 40)[seed % 6], 8 * (1 + seed % 29), 3 + seed % 61
    return (
        torch.randn(rows, inner, generator=generator),
        torch.randn(outputs, inner, generator=generator),
        torch.randn(outputs, generator=generator),
    )


INPUTS = {"linear": generate_inputs, "linear_transposed": generate_transposed_inputs}
