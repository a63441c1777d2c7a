"""Fusions between layers: what may pass between two of them besides a plain tensor, and how they agree on it.

Agreed once, by `settle`, when the weights are loaded and it is known how each matrix is kept. Blocks say who reads
whose result; which form that takes is the layers' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.ops.fp8 import QuantizedActivations
from quire.ops.split_k import PartialSums
from quire.parallel.collectives import Collectives
from quire.parallel.groups import ParallelGroup
from quire.types.ledger import EngineSizes, LedgerLine


class Form(Enum):
    PARTIAL_SUMS = auto()  # split-K partial sums of a matmul, which the reader adds up
    E4M3_PER_TOKEN = auto()  # activations that were quantized where they were computed, a scale for each token
    ROWS = auto()  # this rank's rows of a sum over ranks (sequence parallel)


Local = Tensor | PartialSums | QuantizedActivations


class RowShard(NamedTuple):
    """This rank's rows of what has a row for each token."""

    values: Local  # [share, width]; behind the last token's row are zeros
    num_tokens: int  # of all ranks
    links: Collectives

    def own(self, other: Passed) -> Local:
        """The same rows of something else."""
        return other.values if isinstance(other, RowShard) else self.links.own_rows(whole(other))

    def gathered(self) -> Tensor | QuantizedActivations:
        """The rows of all ranks."""
        if not isinstance(self.values, QuantizedActivations):
            return self.links.gather_rows(whole(self.values), self.num_tokens)
        values, scale, dtype = self.values
        numbers = self.links.gather_rows(values.view(torch.uint8), self.num_tokens).view(values.dtype)
        return QuantizedActivations(numbers, self.links.gather_rows(scale, self.num_tokens), dtype)


Forms = frozenset[Form]
PLAIN: Forms = frozenset()
ROWS: Forms = frozenset({Form.ROWS})
Passed = Local | RowShard
Stream = Tensor | RowShard
"""The residual stream, which a long step holds by rows."""


class Stage(nn.Module):
    """A layer or block whose result goes to another one. By default only tensors pass."""

    ends: tuple[str, str] | None = None
    """The stages inside that read what it reads, and give what it gives, if forms pass through them."""

    @property
    def accepts(self) -> Forms:
        """The forms, besides a tensor, in which it takes what it reads."""
        return PLAIN if self.ends is None else self._stage(self.ends[0]).accepts

    def feed(self, accepted: Forms) -> None:
        """All that read its result take these forms too: it may choose one. Called at most once, by `settle`."""
        if self.ends is not None:
            self._stage(self.ends[1]).feed(accepted)

    def _stage(self, name: str) -> Stage:
        found = self.get_submodule(name)
        assert isinstance(found, Stage)
        return found

    def settle(self) -> None:
        """Tell the stages inside who reads whose result. The weights are loaded."""

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        """What it takes in a step beside its arguments and results; weights do not exist yet."""
        return ()


def settle(model: nn.Module) -> None:
    """Decide the fusions of a whole model; called once, after its weights are loaded."""
    for module in model.modules():
        if isinstance(module, Stage):
            module.settle()


class RankSum:
    """How what ranks have computed of a block's result is added up, before it joins the residual stream."""

    def __init__(self, group: ParallelGroup, *, by_shares: bool = False) -> None:
        """`by_shares`: each rank adds up its share of the rows even where all get the whole."""
        self._group, self._by_rows, self._in_parts = group, False, False
        self._all_reduce = group.collectives.sum_by_shares if by_shares else group.collectives.all_reduce

    def feed(self, accepted: Forms, *, deterministic: bool) -> None:
        """See Stage.feed; with PARTIAL_SUMS the norm that reads it may add up."""
        leaves = self._group.collectives.gathers_parts and not (deterministic or self._group.exact)
        self._by_rows = Form.ROWS in accepted
        self._in_parts = self._group.size > 1 and leaves and Form.PARTIAL_SUMS in accepted

    def __call__(self, out: Tensor) -> Passed:
        links = self._group.collectives
        if not self._by_rows or self._group.rows.num_tokens != out.shape[0]:
            return PartialSums(links.gather_parts(out), out.dtype) if self._in_parts else self._all_reduce(out)
        mine = PartialSums(links.scatter_parts(out), out.dtype) if self._in_parts else links.reduce_scatter(out)
        return RowShard(mine, out.shape[0], links)


def on_rows(work: Callable[..., Tensor], *given: Passed | None) -> Passed:
    """`work`, which computes each row by itself, of tensors; on this rank's rows if any of them is held by rows."""
    shard = next((each for each in given if isinstance(each, RowShard)), None)
    if shard is None:
        return work(*(None if each is None else whole(each) for each in given))
    return shard._replace(values=work(*(None if each is None else whole(shard.own(each)) for each in given)))


def whole(passed: Passed) -> Tensor:
    """As a tensor."""
    if isinstance(passed, RowShard):
        return whole(passed.gathered())
    if isinstance(passed, PartialSums):
        return passed.summed()
    return passed.unpacked() if isinstance(passed, QuantizedActivations) else passed
