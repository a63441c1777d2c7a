"""StepLog: hears what enters the core, what it plans and what comes of it. The null one keeps nothing.

Everything is called on the thread that runs the engine; none of it may raise or block for long.
"""

from __future__ import annotations

from quire.sched.drafters.forced import Forced
from quire.types.messages import ToEngine
from quire.types.step import StepPlan, StepResult


class StepLog:
    """Listens to a core, and forgets."""

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
        """The result of the oldest step in flight is there; `seconds` is how long it kept the device."""

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """The oldest step in flight raised this."""

    def close(self) -> None:
        """The engine ends in good order."""


class StepLogs(StepLog):
    """Tells several."""

    def __init__(self, *logs: StepLog) -> None:
        self._logs = logs

    def took(self, message: ToEngine) -> None:
        for log in self._logs:
            log.took(message)

    def begin(self, now: float) -> None:
        for log in self._logs:
            log.begin(now)

    def ready(self, request_id: str, condition: str) -> None:
        for log in self._logs:
            log.ready(request_id, condition)

    def forced(self, request_id: str, forced: Forced) -> None:
        for log in self._logs:
            log.forced(request_id, forced)

    def planned(self, plan: StepPlan) -> None:
        for log in self._logs:
            log.planned(plan)

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        for log in self._logs:
            log.finished(plan, result, seconds)

    def failed(self, plan: StepPlan, error: Exception) -> None:
        for log in self._logs:
            log.failed(plan, error)

    def close(self) -> None:
        for log in self._logs:
            log.close()


NO_LOG = StepLog()


def join_logs(*logs: StepLog) -> StepLog:
    """One log of all that keep something."""
    kept = [log for log in logs if log is not NO_LOG]
    return kept[0] if len(kept) == 1 else StepLogs(*kept) if kept else NO_LOG
