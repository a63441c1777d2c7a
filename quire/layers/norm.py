"""Normalization as a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.layers.fusion import ROWS, Form, Forms, Local, Passed, RowShard, Stage, Stream, whole
from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.fp8 import QuantizedActivations
from quire.ops.norm import ADD_LAYER_NORM, ADD_RMS_NORM, ADD_RMS_NORM_FP8, LAYER_NORM, RMS_NORM, RMS_NORM_FP8
from quire.ops.split_k import ADD_RMS_NORM_SPLIT_K, PartialSums
from quire.parallel.groups import ParallelGroup


class ResidualMerge(Stage):
    """Stands where a norm would merge the residual stream, and only merges."""

    accepts = ROWS | {Form.PARTIAL_SUMS}  # of `merge`

    def merge(self, hidden: Passed, residual: Stream | None) -> tuple[Passed, Stream]:
        """(what the block after it reads, residual + hidden); before the first layer there is no residual.

        If either is held by rows, so is the stream from here on; the block reads all rows.
        """
        if isinstance(hidden, RowShard):
            shard = hidden
        elif isinstance(residual, RowShard):
            shard = residual
        else:
            return self._merge(hidden, residual)
        read, total = self._merge(shard.own(hidden), None if residual is None else whole(shard.own(residual)))
        return shard._replace(values=read).gathered(), shard._replace(values=total)

    def _merge(self, hidden: Local, residual: Tensor | None) -> tuple[Local, Tensor]:
        """The same of what is not held by rows."""
        total = whole(hidden) if residual is None else residual + whole(hidden)
        return total, total


class RMSNorm(WeightedLayer, ResidualMerge):
    """x / rms(x) * (weight_offset + weight) over the last dimension. Gemma stores weights around 0: offset 1."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, *, eps: float, target: Target, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.weight = empty_parameter(width, dtype=target.dtype)
        self._norm = RMS_NORM.bind(target)
        self._add_norm = ADD_RMS_NORM.bind(target)
        self._add_norm_split_k = ADD_RMS_NORM_SPLIT_K.bind(target)
        self._norm_quantized = RMS_NORM_FP8.bind(target)
        self._add_norm_quantized = ADD_RMS_NORM_FP8.bind(target)
        self._quantizes = False

    def feed(self, accepted: Forms) -> None:
        """`merge` quantizes its result in the same pass if that is what the matmuls after it read anyway."""
        self._quantizes = Form.E4M3_PER_TOKEN in accepted

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.weight_offset)

    def _merge(self, hidden: Local, residual: Tensor | None) -> tuple[Local, Tensor]:
        """(the norm of residual + hidden, residual + hidden)"""
        if self._quantizes:
            return self._merge_quantized(whole(hidden), residual)
        kind = (self.weight, self.eps, self.weight_offset)
        if isinstance(hidden, PartialSums):
            assert residual is not None
            return self._add_norm_split_k(hidden.values, residual, *kind)
        hidden = whole(hidden)
        return (self(hidden), hidden) if residual is None else self._add_norm(hidden, residual, *kind)

    def _merge_quantized(self, hidden: Tensor, residual: Tensor | None) -> tuple[QuantizedActivations, Tensor]:
        kind = (self.weight, self.eps, self.weight_offset)
        if residual is None:
            values, scale = self._norm_quantized(hidden, *kind)
            return QuantizedActivations(values, scale, hidden.dtype), hidden
        values, scale, total = self._add_norm_quantized(hidden, residual, *kind)
        return QuantizedActivations(values, scale, hidden.dtype), total


class LayerNorm(WeightedLayer, ResidualMerge):
    """(x - mean) / deviation * weight + bias over the last dimension."""

    __call__: Callable[..., Tensor]
    accepts = ROWS
    bias: Tensor

    def __init__(self, width: int, *, eps: float, target: Target, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(width, dtype=target.dtype)
        if bias:
            self.bias = empty_parameter(width, dtype=target.dtype)
        else:
            self.register_buffer("bias", torch.zeros(width, dtype=target.dtype), persistent=False)
        self._norm, self._add_norm = LAYER_NORM.bind(target), ADD_LAYER_NORM.bind(target)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)

    def _merge(self, hidden: Local, residual: Tensor | None) -> tuple[Local, Tensor]:
        """(the norm of residual + hidden, residual + hidden)"""
        hidden = whole(hidden)
        if residual is None:
            return self(hidden), hidden
        return self._add_norm(hidden, residual, self.weight, self.bias, self.eps)


class ParallelRMSNorm(RMSNorm):
    """A norm over features that are split over the ranks: gathers them, normalizes, keeps this rank's slice."""

    def __init__(self, width: int, *, eps: float, target: Target, group: ParallelGroup) -> None:
        super().__init__(width, eps=eps, target=target)
        self._group = group
        self._width, (self._start, self._size) = width, group.slice_of(width, "norm width")

    def forward(self, x: Tensor) -> Tensor:
        gathered = self._group.collectives.all_gather(x, self._width)
        normed = self._norm(gathered, self.weight, self.eps, self.weight_offset)
        return normed[..., self._start : self._start + self._size]
