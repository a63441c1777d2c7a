"""A matrix cut along its inputs, whose matmuls are added in a tree: as many ranks as parts get the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quire.layers.quant.base import LinearMethod
from quire.layers.scheme import Scheme, Weight, part_of, part_scheme
from quire.ops.grouped import ADD_SHARED
from quire.ops.select import TAKE_COLUMNS

NUM_PARTS = 8  # over all ranks


class InParts(LinearMethod):
    """`parts` hold the columns one after the other, equally many each; the first has the bias."""

    def __init__(self, parts: Sequence[LinearMethod]) -> None:
        nn.Module.__init__(self)
        self.spec, self.bias = parts[0].spec, parts[0].bias
        self.parts = nn.ModuleList(parts)
        self._methods, self._width = tuple(parts), parts[0].spec.in_features
        self._take, self._add = TAKE_COLUMNS.bind(self.spec.target), ADD_SHARED.bind(self.spec.target)

    def load(self, piece: int, rows: Weight) -> None:
        for index, part in enumerate(self._methods):
            part.load(piece, part_of(rows, 1, index * self._width, self._width))

    def finish(self) -> None:
        for part in self._methods:
            part.finish()

    def multiply(self, x: Tensor) -> Tensor:
        return self._sum(x, 0, len(self._methods))

    def _sum(self, x: Tensor, first: int, count: int) -> Tensor:
        if count == 1:
            return self._methods[first].multiply(self._take(x, first * self._width, self._width))
        half = count // 2
        return self._add(self._sum(x, first, half), self._sum(x, first + half, count - half), None)

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return sum(part.planned_bytes(self._schemes_of(schemes, i)) for i, part in enumerate(self._methods))

    def _schemes_of(self, schemes: Sequence[Scheme], index: int) -> list[Scheme]:
        full = self._width * len(self._methods)
        return [part_scheme(scheme, 1, index * self._width, self._width, full) for scheme in schemes]

    def workspace_bytes(self) -> int:
        return max(part.workspace_bytes() for part in self._methods)

    def decodes(self, scheme: Scheme) -> bool:
        return self._methods[0].decodes(scheme)
