"""Inputs of the ops in quire/ops/norm.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = 4 + seed % 13, 16 * (1 + seed % 7)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randn(width, generator=generator), 1e-6


def generate_add_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, float, float]:
    x, weight, eps = generate_inputs(seed)
    return x, torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1)), weight, eps, float(seed % 2)


def generate_layer_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    x, weight, eps = generate_inputs(seed)
    return x, weight, torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + 2)), eps


def generate_add_layer_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    x, weight, bias, eps = generate_layer_inputs(seed)
    return x, torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1)), weight, bias, eps


INPUTS = {
    "layer_norm": generate_layer_inputs,
    "add_layer_norm": generate_add_layer_inputs,
    "rms_norm": generate_inputs,
    "add_rms_norm": generate_add_inputs,
    "rms_norm_fp8": generate_inputs,
    "add_rms_norm_fp8": generate_add_inputs,
}
