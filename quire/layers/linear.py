"""Linear layers, whole or sharded over a parallel group. The platform's product says how weights are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.linear import DIRECT, choose_product, linear
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError

# Transposing in blocks that fit the cache was measured 5 to 20 times faster than one strided copy.
TRANSPOSE_ROWS = 64


@dataclass(frozen=True)
class Piece:
    """One checkpoint matrix inside a (possibly merged) layer, and the part of its outputs this rank holds."""

    name: str | None
    full_size: int  # outputs in the checkpoint
    start: int
    size: int


class Linear(WeightedLayer):
    """y = x @ weight + bias, built from pieces side by side. Weights are [in, out], or [out, in] if `transposed`.

    `in_slice` is the (start, size) of the checkpoint's inputs that this rank holds; None means all of them.
    """

    def __init__(
        self,
        in_features: int,
        pieces: Sequence[Piece],
        *,
        bias: bool,
        target: Target,
        in_slice: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.full_in_features = in_features
        self.in_start, self.in_features = in_slice or (0, in_features)
        self.out_features = sum(piece.size for piece in pieces)
        self.recipe = DIRECT  # how to call the product batch-invariantly; set by the self-check at start
        self._product, self.transposed = choose_product(target)
        shape = (self.out_features, self.in_features) if self.transposed else (self.in_features, self.out_features)
        self.weight = empty_parameter(*shape, dtype=target.dtype)
        self.bias = empty_parameter(self.out_features, dtype=target.dtype) if bias else None
        self._pieces = tuple(pieces)

    @property
    def is_invariant(self) -> bool:
        """Whether the product itself never depends on the batch, so that no recipe is needed."""
        return self._product is not linear

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, in_features] -> [n, out_features]."""
        return self._matmul(x)

    def _matmul(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias, self.recipe)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        tail = (self.full_in_features,) if parameter == "weight" else ()
        return {piece.name: (piece.full_size, *tail) for piece in self._pieces}

    def load(self, parameter: str, piece: str | None, tensor: Tensor) -> None:
        source_row = target_column = 0
        for part in self._pieces:
            if piece is None or piece == part.name:
                rows = tensor[source_row + part.start : source_row + part.start + part.size]
                self._write(parameter, target_column, rows)
                source_row += part.full_size
            target_column += part.size

    def _write(self, parameter: str, column: int, rows: Tensor) -> None:
        """rows: [outputs, full_in_features] or [outputs]."""
        whole = self.get_parameter(parameter).data
        if parameter != "weight":
            whole[column : column + rows.shape[0]].copy_(rows)
            return
        rows = rows[:, self.in_start : self.in_start + self.in_features]
        if self.transposed:
            whole[column : column + rows.shape[0]].copy_(rows)
            return
        target = whole[:, column : column + rows.shape[0]]
        for start in range(0, rows.shape[0], TRANSPOSE_ROWS):
            block = slice(start, start + TRANSPOSE_ROWS)
            target[:, block].copy_(rows[block].to(target.dtype).t())


class ColumnParallelLinear(Linear):
    """Each rank holds a slice of the outputs and returns that slice."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, target: Target, group: ParallelGroup
    ) -> None:
        piece = Piece(None, out_features, *group.slice_of(out_features, "output features"))
        super().__init__(in_features, (piece,), bias=bias, target=target)


class MergedColumnParallelLinear(Linear):
    """Several column-parallel matrices with the same input, multiplied at once."""

    def __init__(
        self, in_features: int, outputs: Mapping[str, int], *, bias: bool, target: Target, group: ParallelGroup
    ) -> None:
        pieces = [Piece(name, size, *group.slice_of(size, name)) for name, size in outputs.items()]
        super().__init__(in_features, pieces, bias=bias, target=target)


class QKVParallelLinear(Linear):
    """Query, key and value projections at once, split by heads.

    With more ranks than KV heads each KV head is held by several ranks.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        target: Target,
        group: ParallelGroup,
    ) -> None:
        first_head, self.num_heads = group.slice_of(num_heads, "attention heads")
        if group.size > num_kv_heads:
            if group.size % num_kv_heads:
                raise ConfigError(f"{num_kv_heads} KV heads cannot be shared evenly by {group.size} ranks")
            first_kv_head, self.num_kv_heads = group.rank * num_kv_heads // group.size, 1
        else:
            first_kv_head, self.num_kv_heads = group.slice_of(num_kv_heads, "KV heads")
        query = (num_heads * head_dim, first_head * head_dim, self.num_heads * head_dim)
        key_value = (num_kv_heads * head_dim, first_kv_head * head_dim, self.num_kv_heads * head_dim)
        pieces = (Piece("q_proj", *query), Piece("k_proj", *key_value), Piece("v_proj", *key_value))
        super().__init__(in_features, pieces, bias=bias, target=target)


class RowParallelLinear(Linear):
    """Each rank holds a slice of the inputs; the ranks' results are summed."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, target: Target, group: ParallelGroup
    ) -> None:
        in_slice = group.slice_of(in_features, "input features")
        piece = Piece(None, out_features, 0, out_features)
        super().__init__(in_features, (piece,), bias=bias, target=target, in_slice=in_slice)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.collectives.all_reduce(self._matmul(x))

    def load(self, parameter: str, piece: str | None, tensor: Tensor) -> None:
        if parameter == "bias" and self._group.rank:
            tensor = torch.zeros_like(tensor)  # the sum over ranks must contain the bias once
        super().load(parameter, piece, tensor)
