"""Matmuls whose every line has the same bits whatever the number of lines: one order of the inner sum for all.

The tiled kernel without splits adds in that order for any number of lines. The library does too where it does not
split the inner sum, and is faster with many lines; whether it does is found out once for each shape, by comparing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.activation import GATED
from quire.kernels.triton.self_check import cancelling
from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

# Up to here the own kernel is as fast.
_ALWAYS_TILES = 64
_MOST_CANCELLING = 128  # rows whose result is nothing but rounding
_AGREES: dict[tuple[int, int, int, bool, torch.dtype], bool] = {}


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: object = None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias, no line depending on the others."""
    rows = x.shape[0]
    if rows > _ALWAYS_TILES and _library_agrees(rows, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    return matmul_tiles(x, weight, bias, shape=_shape(rows, weight))


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The same with a gated activation after it: x [n, K], weight [2 * N, K] -> [n, N]."""
    if x.shape[0] > _ALWAYS_TILES:
        return GATED[activation](linear_transposed(x, weight, bias))
    return matmul_tiles(x, weight, bias, shape=_shape(x.shape[0], weight), activation=activation)


def _library_agrees(rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the library's result for this number of rows is the tiled kernel's, by bits. The answer is cached."""
    key = (rows, *weight.shape, bias is None, weight.dtype)
    if key not in _AGREES:
        generator = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn(rows, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
        some = torch.arange(min(rows, _MOST_CANCELLING), device=weight.device)
        x[some] = cancelling(weight[some * 7919 % weight.shape[0]])
        bias = None if bias is None else torch.zeros_like(bias)  # it would hide what rounding leaves
        expected = matmul_tiles(x, weight, bias, shape=_shape(rows, weight))
        _AGREES[key] = torch.equal(torch.nn.functional.linear(x, weight, bias), expected)
    return _AGREES[key]


def _shape(rows: int, weight: Tensor) -> TileShape:
    """How to cut the matmul: it changes the speed, never the bits."""
    if weight.element_size() > 2:
        return TileShape(bt=16 if rows <= 16 else 64, bk=32)
    if rows <= 16:
        return TileShape(bk=256) if weight.shape[0] <= 1 << 16 else TileShape()
    if rows <= _ALWAYS_TILES:
        return TileShape()
    if rows <= 1024:
        return TileShape(bt=128, bk=64, num_stages=5)
    return TileShape(bt=256, bn=128, bk=64, num_warps=8, num_stages=3, prefetch=0)
