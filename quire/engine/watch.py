"""Watch: who is told of every step while somebody looks at the console. By default nobody is."""

from __future__ import annotations

from collections.abc import Sequence

from quire.types.console import MemoryLine
from quire.types.ledger import LedgerLine
from quire.types.step import StepPlan, StepResult


class Watch:
    """Told of every step. This one remembers nothing."""

    def planned(self, plan: StepPlan) -> None:
        """A step is about to start; its requests are those of the scheduler's newest step in flight."""

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A step has given its result, after it kept the device for `seconds`."""


NULL_WATCH = Watch()


class Memory:
    """Lines of the ledger, for the console."""

    def __init__(self, lines: Sequence[LedgerLine] = (), supply: int = 0) -> None:
        self.lines = [MemoryLine(line.name, line.num_bytes, line.note) for line in lines]
        self.supply = supply
