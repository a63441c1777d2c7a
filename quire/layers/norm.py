"""RMS normalization as a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.norm import rms_norm
from quire.parallel.groups import ParallelGroup


class RMSNorm(WeightedLayer):
    """x / rms(x) * (weight_offset + weight) over the last dimension. Gemma stores weights around 0: offset 1."""

    def __init__(self, width: int, *, eps: float, dtype: torch.dtype, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.weight = empty_parameter(width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.weight_offset)


class ParallelRMSNorm(RMSNorm):
    """A norm over features that are split over the ranks: gathers them, normalizes, keeps this rank's slice."""

    def __init__(self, width: int, *, eps: float, dtype: torch.dtype, group: ParallelGroup) -> None:
        super().__init__(width, eps=eps, dtype=dtype)
        self._group = group
        self._start, self._size = group.slice_of(width, "norm width")

    def forward(self, x: Tensor) -> Tensor:
        whole = self._group.collectives.all_gather(x, dim=-1)
        normed = rms_norm(whole, self.weight, self.eps)
        return normed[..., self._start : self._start + self._size]
