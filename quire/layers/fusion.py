"""Fusions between layers: what may pass between two of them besides a plain tensor, and how they agree on it.

Agreed once, by `settle`, when the weights are loaded and it is known how each matrix is kept. Blocks say who reads
whose result; which form that takes is the layers' business.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from torch import Tensor, nn

from quire.ops.fp8 import QuantizedActivations
from quire.ops.split_k import PartialSums
from quire.types.ledger import EngineSizes, LedgerLine


class Form(Enum):
    PARTIAL_SUMS = auto()  # split-K partial sums of a matmul, which the reader adds up
    E4M3_PER_TOKEN = auto()  # activations that were quantized where they were computed, a scale for each token


Forms = frozenset[Form]
PLAIN: Forms = frozenset()
Passed = Tensor | PartialSums | QuantizedActivations


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
        return None

    def contributes(self, sizes: EngineSizes) -> Iterable[LedgerLine]:
        """What it takes in a step beside its arguments and results; weights do not exist yet."""
        return ()


def settle(model: nn.Module) -> None:
    """Decide the fusions of a whole model; called once, after its weights are loaded."""
    for module in model.modules():
        if isinstance(module, Stage):
            module.settle()


def whole(passed: Passed) -> Tensor:
    """As a tensor."""
    if isinstance(passed, PartialSums):
        return passed.summed()
    return passed.unpacked() if isinstance(passed, QuantizedActivations) else passed
