"""Multiplication by one number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.base import Op, native


def scale(x: Tensor, factor: float) -> Tensor:
    """x [n, width] times a number."""
    return x * factor


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number that the type has, of those that are neither tiny nor huge."""
    mantissa, exponent = math.frexp(value)
    steps = 2.0 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)


def generate_inputs(seed: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + seed % 40, 1 + 37 * seed, generator=generator), 0.1 + seed


SCALE = Op("scale", scale, generate_inputs, 0.0, (native("scale"),))
