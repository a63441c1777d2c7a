"""StepLog: hears what enters the core, what it plans and what comes of it. The null one keeps nothing.

Everything is called on the thread that runs the engine; none of it may raise or block for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.sched.drafters.forced import Forced
from quire.types.messages import ToEngine
from quire.types.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class StepLog:
    """Listens to a core, and forgets."""

    def attach(self, core: EngineCore) -> None:
        """This core will be heard; comes first."""

    def held(self, word: str) -> None:
        """No step is planned from now on, since the engine is this, such as "paused"; "": steps are planned again."""

    def took(self, message: ToEngine) -> None:
        """A message was taken in, before the next step."""

    def begin(self, now: float) -> None:
        """EngineCore.step() is called, at `now` on the core's clock."""

    def ready(self, request_id: str, condition: str) -> None:
        """A parked request was handed what it waited for, in this step; or, without a name, a change is done."""

    def forced(self, request_id: str, forced: Forced) -> None:
        """The plan in the making was given these tokens, which the request's grammar leaves no choice about."""

    def planned(self, plan: StepPlan) -> None:
        """A step is about to be executed."""

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """The result of the oldest step in flight is there; it kept the device for `seconds`, 0: unknown."""

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """The oldest step in flight raised this."""

    def close(self) -> None:
        """The engine ends in good order."""


class StepLogs(StepLog):
    """Tells several."""

    def __init__(self, *logs: StepLog) -> None:
        for name in ("attach", "held", "took", "begin", "ready", "forced", "planned", "finished", "failed", "close"):
            setattr(self, name, partial(_tell_all, [getattr(log, name) for log in logs]))


def _tell_all(methods: Sequence[Callable[..., None]], *said: object) -> None:
    for method in methods:
        method(*said)


NO_LOG = StepLog()


def join_logs(*logs: StepLog) -> StepLog:
    """One log of all that keep something."""
    kept = [log for log in logs if log is not NO_LOG]
    return kept[0] if len(kept) == 1 else StepLogs(*kept) if kept else NO_LOG
