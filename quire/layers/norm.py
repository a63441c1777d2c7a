"""RMS normalization as a layer."""

from __future__ import annotations

from torch import Tensor

from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.fp8 import Fp8Lines
from quire.ops.norm import ADD_RMS_NORM, ADD_RMS_NORM_FP8, RMS_NORM, RMS_NORM_FP8
from quire.ops.parts import ADD_RMS_NORM_IN_PARTS, Parts
from quire.parallel.groups import ParallelGroup


class _NormWeight(WeightedLayer):
    """x / rms(x) * (weight_offset + weight) over the last dimension. Gemma stores weights around 0: offset 1."""

    def __init__(self, width: int, *, eps: float, target: Target, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.weight = empty_parameter(width, dtype=target.dtype)


class RMSNorm(_NormWeight):
    """The norm in the type of its input."""

    def __init__(self, width: int, *, eps: float, target: Target, weight_offset: float = 0.0) -> None:
        super().__init__(width, eps=eps, target=target, weight_offset=weight_offset)
        self._norm = RMS_NORM.bind(target)
        self._add_norm = ADD_RMS_NORM.bind(target)
        self._add_norm_in_parts = ADD_RMS_NORM_IN_PARTS.bind(target)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.weight_offset)

    def merge(self, hidden: Tensor | Parts, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the norm of residual + hidden, residual + hidden); before the first layer there is no residual."""
        kind = (self.weight, self.eps, self.weight_offset)
        if isinstance(hidden, Parts):
            assert residual is not None
            return self._add_norm_in_parts(hidden.values, residual, *kind)
        return (self(hidden), hidden) if residual is None else self._add_norm(hidden, residual, *kind)


class Fp8RMSNorm(_NormWeight):
    """A norm whose result only products in fp8 read: it is quantized in the same pass."""

    def __init__(self, width: int, *, eps: float, target: Target, weight_offset: float = 0.0) -> None:
        super().__init__(width, eps=eps, target=target, weight_offset=weight_offset)
        self._norm_lines = RMS_NORM_FP8.bind(target)
        self._add_norm_lines = ADD_RMS_NORM_FP8.bind(target)

    def merge(self, hidden: Tensor | Parts, residual: Tensor | None) -> tuple[Fp8Lines, Tensor]:
        """As that of RMSNorm."""
        kind = (self.weight, self.eps, self.weight_offset)
        hidden = hidden.summed() if isinstance(hidden, Parts) else hidden
        if residual is None:
            values, scale = self._norm_lines(hidden, *kind)
            return Fp8Lines(values, scale, hidden.dtype), hidden
        values, scale, total = self._add_norm_lines(hidden, residual, *kind)
        return Fp8Lines(values, scale, hidden.dtype), total


class ParallelRMSNorm(RMSNorm):
    """A norm over features that are split over the ranks: gathers them, normalizes, keeps this rank's slice."""

    def __init__(self, width: int, *, eps: float, target: Target, group: ParallelGroup) -> None:
        super().__init__(width, eps=eps, target=target)
        self._group = group
        self._start, self._size = group.slice_of(width, "norm width")

    def forward(self, x: Tensor) -> Tensor:
        whole = self._group.collectives.all_gather(x, dim=-1)
        normed = self._norm(whole, self.weight, self.eps, self.weight_offset)
        return normed[..., self._start : self._start + self._size]
