"""Inputs of the ops in quire/ops/scale.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + seed % 40, 1 + 37 * seed, generator=generator), 0.1 + seed


def generate_row_inputs(seed: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = (1, 3, 40)[seed % 3], 1 + 37 * seed
    factors = torch.rand(rows, 1, 1 + seed % 2, generator=generator)
    return torch.randn(rows, width, generator=generator), factors, width if seed % 2 else width // 2


INPUTS = {"scale": generate_inputs, "scale_rows": generate_row_inputs}
