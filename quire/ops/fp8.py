"""Matmuls with a weight kept in eight-bit floats: each row of both sides has a scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.base import Op, triton_pair

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Of a row of zeros.
MIN_SCALE = 1e-30


class QuantizedActivations(NamedTuple):
    """Activations quantized row by row where they were computed."""

    values: Tensor  # [n, width] fp8
    scale: Tensor  # [n] float32
    dtype: torch.dtype  # what they were before

    def unpacked(self) -> Tensor:
        return (self.values.float() * self.scale[:, None]).to(self.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale as fp8 [n, width], scale [n] float32): a row's largest value becomes the largest fp8 number."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / FP8_MAX).clamp_(min=MIN_SCALE)
    return (wide / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, K] @ (weight [N, K] * scale [N, 1]).T + bias, x being quantized row by row first. In x's type."""
    return prequantized_linear_fp8(*quantize_rows(x), weight, scale, bias, x.dtype)


def prequantized_linear_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(x [n, K] * x_scale [n, 1]) @ (weight [N, K] * scale [N, 1]).T + bias, in `dtype`; both are fp8."""
    out = (x.float() @ weight.float().t()) * x_scale[:, None] * scale
    return (out if bias is None else out + bias.float()).to(dtype)


_KERNELS = triton_pair("fp8", unavailable="triton.quantize:unavailable")
LINEAR_FP8 = Op(linear_fp8, 2e-2, *_KERNELS)
PREQUANTIZED_LINEAR_FP8 = Op(prequantized_linear_fp8, 2e-2, *_KERNELS)
