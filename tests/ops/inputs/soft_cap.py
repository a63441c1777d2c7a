"""Inputs of the ops in quire/ops/scale.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + seed % 40, 1 + 37 * seed, generator=generator) * 40, (30.0, 50.0)[seed % 2]


INPUTS = {"soft_cap": generate_inputs}
