"""Normalization ops: their torch reference, which is also their definition."""

from __future__ import annotations

from torch import Tensor

from quire.ops.base import Op, native, triton
from quire.ops.fp8 import quantize_rows

_STEP_OF_FP8 = 0.13  # two neighbours differ by an eighth at most


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


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual); both [n, width]."""
    total = residual + x
    return rms_norm(total, weight, eps, weight_offset), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, computed in float32. x: [n, width]."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    inverse = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight.float()).add_(bias.float()).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual); both [n, width]."""
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The norm of x [n, width] quantized row by row: (values, scale [n])."""
    return quantize_rows(rms_norm(x, weight, eps, weight_offset))


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual quantized row by row, and x + residual: (values, scale [n], sum)."""
    normed, total = add_rms_norm(x, residual, weight, eps, weight_offset)
    return *quantize_rows(normed), total


LAYER_NORM = Op(layer_norm, 1e-5, triton("layer_norm"), native())
ADD_LAYER_NORM = Op(add_layer_norm, 1e-5, triton("layer_norm"), native())
RMS_NORM = Op(rms_norm, 1e-5, triton("norm"), native())
ADD_RMS_NORM = Op(add_rms_norm, 1e-5, triton("norm"), native())
RMS_NORM_FP8 = Op(rms_norm_fp8, _STEP_OF_FP8, triton("norm"))
ADD_RMS_NORM_FP8 = Op(add_rms_norm_fp8, _STEP_OF_FP8, triton("norm"))
