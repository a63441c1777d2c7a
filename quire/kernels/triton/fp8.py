"""Matmuls of fp8 activations, each line with a scale, with fp8 weights [out_features, in_features]."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from quire.kernels.triton.matmul import arrival_counters
from quire.kernels.triton.quantize import quantize_rows
from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

# Beyond it the library is as fast; below it reads weights at less than half of the bandwidth.
_MAX_FEW_ROWS = 64


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, K] @ (weight [N, K] * scale [N, 1]).T + bias, in x's type; x is quantized here."""
    return prequantized_linear_fp8(*quantize_rows(x), weight, scale, bias, x.dtype)


def linear_fp8_fixed(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, the inner sum in one order for any number of lines."""
    return prequantized_linear_fp8_fixed(*quantize_rows(x), weight, scale, bias, x.dtype)


def prequantized_linear_fp8(
    lines: Tensor, line_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(lines [n, K] * line_scale [n, 1]) @ (weight [N, K] * scale [N, 1]).T + bias, in `dtype`; both are fp8."""
    rows, (n, k) = lines.shape[0], weight.shape
    if rows > _MAX_FEW_ROWS and dtype == torch.bfloat16 and n % 16 == 0 and k % 16 == 0:
        return torch._scaled_mm(
            lines, weight.t(), line_scale[:, None], scale[None, :], bias, out_dtype=dtype, use_fast_accum=True
        )
    shape = _shape(rows, n)
    if rows <= 16 and triton.cdiv(n, shape.bn) < 96:
        shape = replace(shape, splits=4)
    counters = arrival_counters(lines.device)
    scales = (line_scale, scale)
    return matmul_tiles(lines, weight, bias, shape=shape, counters=counters, scales=scales, out_dtype=dtype)


def prequantized_linear_fp8_fixed(
    lines: Tensor, line_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same, the inner sum in one order for any number of lines."""
    shape = _shape(lines.shape[0], weight.shape[0])
    return matmul_tiles(lines, weight, bias, shape=shape, scales=(line_scale, scale), out_dtype=dtype)


def _shape(rows: int, n: int) -> TileShape:
    """Measured on an H200."""
    if rows > _MAX_FEW_ROWS:
        return TileShape(bt=128, bn=128, num_warps=8)
    if rows > 16 and n > 16384:
        return TileShape(num_stages=6, prefetch=4)
    return TileShape(bk=256)
