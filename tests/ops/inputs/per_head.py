"""Inputs of the ops in quire/ops/latent.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n, heads = (1, 2, 5, 16, 17, 70)[seed % 6], (1, 4, 3)[seed % 3]
    inner, outputs = 16 * (1 + seed % 5), 16 * (1 + seed % 7)
    x = torch.randn(n, heads, inner + 8, generator=generator)[..., :inner]
    return x, torch.randn(heads, inner, outputs, generator=generator) * inner**-0.5


INPUTS = {"per_head": generate_inputs}
