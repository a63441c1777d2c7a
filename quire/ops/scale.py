"""Multiplication by one number, or by one for each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


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


SCALE = Op("scale", scale, 0.0, (native("scale"),))
SCALE_ROWS = Op("scale_rows", scale_rows, 0.0, (triton("scale_rows", "scale_rows"), native("scale_rows")))
