"""Multiplication by one number, or by one for each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native


def scale(x: Tensor, factor: float) -> Tensor:
    """x [n, width] times a number."""
    return x * factor


def scale_rows(x: Tensor, factors: Tensor, count: int) -> Tensor:
    """x [n, width] with the first `count` of row i times the first of factors[i]; float32 inside, factors too."""
    scaled = (x[:, :count].float() * factors.flatten(1)[:, :1].float()).to(x.dtype)
    return torch.cat((scaled, x[:, count:]), dim=1)


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number that the type has, of those that are neither tiny nor huge."""
    mantissa, exponent = math.frexp(value)
    steps = 2.0 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)


def generate_inputs(seed: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + seed % 40, 1 + 37 * seed, generator=generator), 0.1 + seed


def generate_row_inputs(seed: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = (1, 3, 40)[seed % 3], 1 + 37 * seed
    factors = torch.rand(rows, 1, 1 + seed % 2, generator=generator)
    return torch.randn(rows, width, generator=generator), factors, width if seed % 2 else width // 2


SCALE = Op("scale", scale, generate_inputs, 0.0, (native("scale"),))
SCALE_ROWS = Op(
    "scale_rows",
    scale_rows,
    generate_row_inputs,
    0.0,
    (Implementation("triton", "triton.scale_rows:scale_rows", ("cuda",)), native("scale_rows")),
)
