"""Normalization ops: their torch reference, which is also their definition."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight_offset + weight) over the last dimension, computed in float32.

    x: [..., width]; weight: [width]. The result has x's dtype.
    """
    scale = weight.float()
    if weight_offset:
        scale = scale + weight_offset
    wide = x.float()
    inverse_rms = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse_rms).mul_(scale).to(x.dtype)


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = 4 + seed % 13, 16 * (1 + seed % 7)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randn(width, generator=generator), 1e-6
