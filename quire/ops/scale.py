"""Multiplication by one number, or by one for each row, and soft-capping."""

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


SCALE = Op(scale, 0.0, native())
SCALE_ROWS = Op(scale_rows, 0.0, triton("scale_rows"), native())


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with tanh written through exp: torch's own tanh may round tail elements differently.

    Computed in float32: near 0 the two terms cancel, which bfloat16 would turn into steps of a quarter at cap 50.
    """
    return (cap - (2.0 * cap) / ((x.float() * (2.0 / cap)).exp_() + 1.0)).to(x.dtype)


SOFT_CAP = Op(soft_cap, 1e-5, native())
