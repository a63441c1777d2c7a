"""Inputs of the ops in quire/ops/split_k.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.inputs.linear import generate_transposed_inputs
from tests.ops.inputs.norm import generate_add_inputs


def generate_norm_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, float, float]:
    x, residual, weight, eps, offset = generate_add_inputs(seed)
    generator = torch.Generator().manual_seed(seed + 2)
    return torch.randn(1 + seed % 8, *x.shape, generator=generator), residual, weight, eps, offset


INPUTS = {"linear_split_k": generate_transposed_inputs, "add_rms_norm_split_k": generate_norm_inputs}
