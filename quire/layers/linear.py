"""Linear layers, whole or sharded over a parallel group. How a rank's part is stored is its method's business."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire.layers.adapters import Adaptable, AdapterSizes, LinearAdapters, LoraPair
from quire.layers.fusion import Form, Forms, Passed, RankSum, Stage, whole
from quire.layers.quant.base import LinearMethod, MatrixMethod, MatrixRole, MatrixSpec, Shrinking
from quire.layers.quant.in_parts import NUM_PARTS, InParts
from quire.layers.quant.registry import choose_method
from quire.layers.scheme import F32, Scheme, Weight, as_tensor, part_of, part_scheme, rows_of
from quire.layers.weights import NO_SCHEMES, Schemes, WeightedLayer
from quire.ops.base import Target
from quire.ops.fp8 import QuantizedActivations
from quire.ops.split_k import PartialSums, whole_or_parts
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError
from quire.types.ledger import EngineSizes, LedgerLine


@dataclass(frozen=True)
class Piece:
    """One checkpoint matrix inside a (possibly merged) layer, and the part of its outputs this rank holds."""

    name: str | None
    full_size: int  # outputs in the checkpoint
    start: int
    size: int


class MatrixLayer(WeightedLayer, Adaptable):
    """A layer whose matrices and biases are kept by a method."""

    method: MatrixMethod

    def __init__(self, *, bias: bool, target: Target) -> None:
        super().__init__()
        self._bias, self._target, self._device = bias, target, torch.get_default_device()
        self.adapters = None

    def weight_names(self) -> tuple[str, ...]:
        return ("weight", "bias") if self._bias else ("weight",)

    def finish(self) -> None:
        self.method.finish()

    def planned_bytes(self, schemes: Schemes) -> int:
        bias = 0 if self.method.bias is None else self.method.bias.nbytes
        return bias + self.method.planned_bytes(self._loaded_schemes(schemes))

    @abstractmethod
    def _loaded_schemes(self, schemes: Schemes) -> list[Scheme]:
        """The scheme in which the method gets each piece of what is stored so."""


class Linear(MatrixLayer, Stage):
    """y = x @ weight^T + bias, built from pieces one above the other.

    `in_slice` is the (start, size) of the checkpoint's inputs that this rank holds; None means all of them.
    """

    __call__: Callable[..., Passed]
    role: MatrixRole = "linear"
    method: LinearMethod

    def __init__(
        self,
        in_features: int,
        pieces: Sequence[Piece],
        *,
        bias: bool,
        target: Target,
        in_slice: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(bias=bias, target=target)
        self.full_in_features = in_features
        self.in_start, self.in_features = in_slice or (0, in_features)
        self.out_features, self._pieces = sum(piece.size for piece in pieces), tuple(pieces)
        self._beside: Shrinking | None = None
        self._split_k: Callable[[Tensor], Tensor | PartialSums] | None = None

    def takes(self, sizes: AdapterSizes) -> bool:
        return self.role != "router"

    def adapter_shape(self, piece: str | None) -> tuple[int, int] | None:
        found = next((part for part in self._pieces if part.name == piece), None)
        return None if found is None else (found.full_size, self.full_in_features)

    def adapt(self, sizes: AdapterSizes) -> None:
        widths = [piece.size for piece in self._pieces]
        with self._device:
            self.adapters = LinearAdapters(self.in_features, widths, sizes, self._target)

    def allocate(self, path: str = "", schemes: Schemes = NO_SCHEMES) -> Self:
        sizes = tuple(piece.size for piece in self._pieces)
        spec = MatrixSpec(self.in_features, sizes, self._bias, self._target, path, self.role)
        with self._device:
            self.method = choose_method(spec, self._loaded_schemes(schemes))
        if self.adapters is not None:
            self._beside = self.method.shrinking()
        return self

    @property
    def accepts(self) -> Forms:
        return self.method.accepts

    def feed(self, accepted: Forms) -> None:
        if Form.PARTIAL_SUMS in accepted:
            self._split_k = self.method.split_k()

    def forward(self, x: Passed) -> Passed:
        """x: [n, in_features] -> [n, out_features]."""
        x = x if isinstance(x, QuantizedActivations) else whole(x)
        if self.adapters is None or not self.adapters.is_active:
            return self._multiply(x)
        return self.adapters.expand(*self.multiply_and_shrink(x))

    def multiply_and_shrink(self, x: Tensor | QuantizedActivations) -> tuple[Passed, list[Tensor]]:
        """The result without what adapters add, and what their `expand` takes; some token has an adapter."""
        assert self.adapters is not None
        if self._beside is None or isinstance(x, QuantizedActivations):
            shrunk = self.adapters.shrink(x)  # first: the matmul need not wait for it
            return self._multiply(x), shrunk
        parts, shrunk = self.adapters.shrink_beside(self._beside, x, in_parts=self._split_k is not None)
        return whole_or_parts(parts, x.dtype), shrunk

    def _multiply(self, x: Tensor | QuantizedActivations) -> Passed:
        if isinstance(x, QuantizedActivations):
            return self.method.multiply_quantized(x)
        return self.method.multiply(x) if self._split_k is None else self._split_k(x)

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        num_bytes = self.method.workspace_bytes()
        if num_bytes:
            yield LedgerLine("unpacked weights", num_bytes, "the largest matrix that prompts unpack", in_step=True)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        tail = (self.full_in_features,) if parameter == "weight" else ()
        return {piece.name: (piece.full_size, *tail) for piece in self._pieces}

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        source_row = target_row = 0
        for index, part in enumerate(self._pieces):
            if piece is None or piece == part.name:
                rows = self._taken(index, weight, source_row)
                if parameter == "weight":
                    self.method.load(index, part_of(rows, 1, self.in_start, self.in_features))
                else:
                    self.method.load_bias(target_row, as_tensor(rows))
                source_row += part.full_size
            target_row += part.size

    def _taken(self, index: int, weight: Weight, first: int) -> Weight:
        """The rows of a piece that this rank keeps, of a tensor in which the piece begins at row `first`."""
        part, order = self._pieces[index], self._order(index)
        first += part.start
        return part_of(weight, 0, first, part.size) if order is None else rows_of(weight, first + order)

    def kept_order(self, piece: str | None) -> Tensor | None:
        return next((self._order(index) for index, part in enumerate(self._pieces) if part.name == piece), None)

    def _order(self, index: int) -> Tensor | None:
        """`kept_order` of a piece by its index, counted within this rank's part of it."""
        return None

    def adapter_parts(self, piece: str | None, pair: LoraPair) -> dict[int, LoraPair]:
        down = pair.down[:, self.in_start : self.in_start + self.in_features]
        for index, part in enumerate(self._pieces):
            if piece == part.name:
                return {index: LoraPair(down, as_tensor(self._taken(index, pair.up.T.contiguous(), 0)).T)}
        raise KeyError(piece)

    def _loaded_schemes(self, schemes: Schemes) -> list[Scheme]:
        whole, row, loaded = schemes.get(("weight", None)), 0, []
        outputs = sum(piece.full_size for piece in self._pieces)
        for piece in self._pieces:
            stored = whole or schemes.get(("weight", piece.name), F32)
            start, size = (piece.start, piece.full_size) if whole is None else (row + piece.start, outputs)
            rows = part_scheme(stored, 0, start, piece.size, size)
            loaded.append(part_scheme(rows, 1, self.in_start, self.in_features, self.full_in_features))
            row += piece.full_size
        return loaded


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


class UpGateLinear(MergedColumnParallelLinear):
    """`gate_proj` and `up_proj`, which a checkpoint may have in one matrix with the second first."""

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        size = self._pieces[0].full_size
        whole = (("up_proj", part_of(weight, 0, 0, size)), ("gate_proj", part_of(weight, 0, size, size)))
        for name, rows in whole if piece is None else ((piece, weight),):
            super().load(parameter, name, rows)


class ReorderedLinear(Linear):
    """Merged matrices of some of which a rank keeps rows in its own order: orders[name][i] is the row kept as i."""

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str | None, int],
        orders: Mapping[str | None, Tensor | None],
        *,
        bias: bool,
        target: Target,
    ) -> None:
        """outputs: rows of each matrix in a checkpoint; one without an order is kept as it is."""
        kept = [orders.get(name) for name in outputs]
        pieces = [
            Piece(name, size, 0, size if order is None else len(order))
            for (name, size), order in zip(outputs.items(), kept, strict=True)
        ]
        super().__init__(in_features, pieces, bias=bias, target=target)
        self._orders = kept

    def _order(self, index: int) -> Tensor | None:
        return self._orders[index]


class QKVParallelLinear(Linear):
    """Query, key and value projections at once, split by heads.

    With more ranks than KV heads each KV head is held by several ranks. `interleaved`: in a checkpoint, features of a
    query or key head that are rotated together lie side by side; they are kept half a head apart.
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
        interleaved: bool = False,
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
        self._interleaved_dim = head_dim if interleaved else None

    def _order(self, index: int) -> Tensor | None:
        dim, size = self._interleaved_dim, self._pieces[index].size
        return None if dim is None or index == 2 else in_halves(size, size // dim, 0, dim)


def in_halves(size: int, heads: int, first: int, end: int) -> Tensor:
    """The order in which pairs of features [first, end) of each head, side by side, come to lie in two halves."""
    order = torch.arange(size).view(heads, -1)
    order[:, first:end] = order[:, first:end].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return order.flatten()


class RowParallelLinear(Linear):
    """Each rank holds a slice of the inputs; the ranks' results are summed."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, target: Target, group: ParallelGroup
    ) -> None:
        in_slice = group.slice_of(in_features, "input features")
        piece = Piece(None, out_features, 0, out_features)
        super().__init__(in_features, (piece,), bias=bias, target=target, in_slice=in_slice)
        self._group, self._sum = group, RankSum(group)

    def allocate(self, path: str = "", schemes: Schemes = NO_SCHEMES) -> Self:
        if not self._group.exact:
            return super().allocate(path, schemes)
        count, loaded = NUM_PARTS // self._group.size, self._loaded_schemes(schemes)
        if self.full_in_features % NUM_PARTS:
            raise ConfigError(
                f"{path} has {self.full_in_features} inputs, which tp_exact cannot cut into {NUM_PARTS} parts"
            )
        width, parts = self.in_features // count, []
        for index in range(count):
            stored = [part_scheme(one, 1, index * width, width, self.in_features) for one in loaded]
            spec = MatrixSpec(width, (self.out_features,), self._bias and not index, self._target, path, self.role)
            with self._device:
                parts.append(choose_method(spec, stored))
        self.method = InParts(parts)
        return self

    def forward(self, x: Passed) -> Passed:
        out = super().forward(x)
        return self._sum(out) if isinstance(out, Tensor) else out

    def feed(self, accepted: Forms) -> None:
        self._sum.feed(accepted, deterministic=self._target.deterministic)
        if self._group.size == 1 and not self._group.exact:  # else ranks add up whole ones
            super().feed(accepted)

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        if parameter == "bias" and self._group.rank:
            weight = torch.zeros_like(as_tensor(weight))  # the sum over ranks must contain the bias once
        super().load(parameter, piece, weight)
