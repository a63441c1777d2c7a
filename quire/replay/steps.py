"""Replays a trace step by step on a core, and names the first step and request that differ. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.engine.constraints import Constraints
from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.engine.hold import Hold
from quire.engine.parked import Condition, ParkedRequests
from quire.engine.step_log import StepLog
from quire.engine.trace.records import (
    PLAN_PARTS,
    RESULT_PARTS,
    Failed,
    Finished,
    Planned,
    Record,
    RollingHash,
    Took,
    plan_digests,
    result_digests,
)
from quire.replay.turns import Turn, turns
from quire.sched.drafters.forced import Forced
from quire.sched.scheduler import Scheduler
from quire.types.errors import TraceError
from quire.types.messages import AbortRequests, Command
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor

_READY_LIMIT = 60.0  # seconds that a grammar may take to compile here


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as it was recorded."""

    step_id: int
    request_ids: tuple[str, ...]
    part: str  # of the plan or the result
    detail: str

    def __str__(self) -> str:
        who = ", ".join(self.request_ids) or "none"
        return f"step {self.step_id}, request {who}: {self.part} differ: {self.detail}"


@dataclass(frozen=True)
class ReplayReport:
    num_steps: int
    num_requests: int
    seconds: float
    recorded_seconds: float
    rolling: str  # hash of all plans and results
    difference: Difference | None = None
    crashed_step: int | None = None  # that the recorded engine planned and never finished
    crashed_requests: tuple[str, ...] = ()  # that were open then


class _StopReplayError(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class Comparison(StepLog):
    """Compares what a core does with what is recorded of the turn, and stops it at the first difference."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.num_planned = 0  # in this turn
        self.num_steps = 0
        self.rolling = RollingHash()
        self._owners: dict[int, str] = {}  # row -> request
        self._plans: dict[int, tuple[int, int, int, int]] = {}

    def start(self, turn: Turn) -> None:
        self.turn, self.num_planned = turn, 0

    def names(self, plan: StepPlan) -> tuple[str, ...]:
        return tuple(self._owners.get(row, "?") for row in plan.rows)

    def recorded_forced(self, request_id: str) -> Forced:
        """What the request's grammar had found when the plan that is next was made."""
        if self.num_planned == len(self.turn.planned):
            return 0, ()
        return self.turn.planned[self.num_planned].forced.get(request_id, (0, ()))

    def planned(self, plan: StepPlan) -> None:
        self._owners.update({start.row: start.request_id for start in plan.starts})
        digests = self._plans[plan.step_id] = plan_digests(plan)
        if self.num_planned == len(self.turn.planned):
            raise _StopReplayError(Difference(plan.step_id, self.names(plan), "plans", "this step was not planned"))
        recorded = self.turn.planned[self.num_planned]
        self.num_planned += 1
        for part, was, now in zip(PLAN_PARTS, recorded.digests, digests, strict=True):
            if was != now:
                raise _StopReplayError(
                    Difference(plan.step_id, self.names(plan), f"{part} of the plan", f"{was:08x} is now {now:08x}")
                )

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        end, names = self.turn.end, self.names(plan)
        if not isinstance(end, Finished):
            said = end.error if isinstance(end, Failed) else "no result"
            raise _StopReplayError(Difference(plan.step_id, names, "ends", f"{said!r} is now a result"))
        digests = result_digests(result)
        for index, (was_ids, now_ids) in enumerate(zip(end.token_ids, result.token_ids, strict=True)):
            if was_ids != now_ids:
                detail = f"{was_ids} is now {now_ids}"
                raise _StopReplayError(Difference(plan.step_id, (names[index],), "token_ids of the result", detail))
        for index in sorted(end.digests.keys() | digests.keys()):
            none = (0,) * len(RESULT_PARTS)
            pairs = zip(RESULT_PARTS, end.digests.get(index, none), digests.get(index, none), strict=True)
            for part, was, now in pairs:
                if was != now:
                    detail = f"{was:08x} is now {now:08x}"
                    raise _StopReplayError(Difference(plan.step_id, (names[index],), f"{part} of the result", detail))
        if self.rolling.add(self._plans.pop(plan.step_id), result.token_ids, digests) != end.rolling:
            raise _StopReplayError(Difference(plan.step_id, names, "rolling hashes", "the trace was changed"))
        self.num_steps += 1

    def failed(self, plan: StepPlan, error: Exception) -> None:
        end, now = self.turn.end, f"{type(error).__name__}: {error}"
        self._plans.clear()
        if not isinstance(end, Failed):
            raise _StopReplayError(Difference(plan.step_id, self.names(plan), "ends", f"a result is now {now!r}"))
        if end.error != now:
            raise _StopReplayError(
                Difference(plan.step_id, self.names(plan), "errors", f"{end.error!r} is now {now!r}")
            )
        self.num_steps += 1


class _GatedRequests(ParkedRequests):
    """Requests that become ready when the trace says so, and in its order."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        super().__init__(conditions)
        self._arrived: dict[tuple[str, str], Any] = {}
        self._changed = threading.Condition()

    def release(self, wanted: list[tuple[str, str]]) -> None:
        """Wait until these are ready, and let the next step have them."""
        for key in wanted:
            with self._changed:
                if not self._changed.wait_for(partial(self._arrived.__contains__, key), _READY_LIMIT):
                    raise TraceError(f"request {key[0]} has waited {_READY_LIMIT:g} s for its {key[1]} here")
                self._news.append(self._arrived.pop(key))

    def _tell(self, parked: Any, condition: Condition, future: Future[Any]) -> None:
        with self._changed:
            self._arrived[parked.request.request_id, condition.name] = (parked, condition, future)
            self._changed.notify_all()


class _GatedHold(Hold):
    """Changes (sleep, wake, other weights) that are done when the trace says so."""

    is_released = False

    @property
    def has_news(self) -> bool:
        return super().has_news if self._drains_for is not None else self.is_released

    def release(self) -> None:
        """Wait until the change under way is done, and let the next step have it."""
        if self._work is None:
            raise TraceError("a change of the engine is done that did not begin here")
        self._work.exception(_READY_LIMIT)
        self.is_released = True

    def advance(self) -> None:
        super().advance()
        self.is_released = False


class ReplayedCore(EngineCore):
    """A core that takes its times, and how far it plans ahead, from a trace."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        steps_in_flight: int,
        constraints: Constraints | None = None,
        *,
        conditions: Sequence[Condition] = (),
        log: Comparison,
    ) -> None:
        super().__init__(scheduler, executor, steps_in_flight, constraints, conditions=conditions, log=log)
        self._comparison = log
        self.parked = self._gated = _GatedRequests(self.parked.conditions)
        self.hold = self._gated_hold = _GatedHold(self)
        self._turn: Turn | None = None
        self._later: Iterator[Turn] = iter(())

    def replay(self, recorded: Iterator[Turn]) -> Iterator[Turn]:
        """Run turns; yields each after its messages were taken and before its steps, which a caller may prevent."""
        self._later = recorded
        for turn in recorded:
            self._turn = turn
            for took in turn.took:
                if not isinstance(took, Took):
                    raise TraceError("the trace is redacted: it has no tokens to run")
                self.take(took.message)
            yield turn
            if self._turn is not None and turn.begin is not None:
                self.run_turn(turn)

    def finish_steps(self) -> None:
        """A message made the recorded engine finish them: what follows in the trace is that."""
        while self._in_flight:
            turn, self._turn = self._turn or next(self._later), None
            self.run_turn(turn)

    def take(self, message: EngineRequest | AbortRequests | Command) -> None:
        match message:
            case EngineRequest():
                self.add_request(message)
            case AbortRequests():
                self.abort(message.request_ids)
            case Command():
                obey(self, message)

    def run_turn(self, turn: Turn) -> None:
        self._comparison.start(turn)
        self._gated.release([(name, condition) for name, condition in turn.ready if name])
        if any(not name for name, _ in turn.ready):
            self._gated_hold.release()
        self.step()
        if self._comparison.num_planned < len(turn.planned):
            missing = turn.planned[self._comparison.num_planned]
            raise _StopReplayError(Difference(missing.step_id, (), "plans", "a step is not planned any more"))

    def _may_plan(self) -> bool:
        """As it was planned; where no more was, the scheduler is asked all the same if it was then."""
        is_recorded = self._comparison.num_planned < len(self._comparison.turn.planned)
        return is_recorded or super()._may_plan()

    def _seconds(self, started: float, begin: float, asked: float) -> float:
        end = self._comparison.turn.end
        return end.seconds if isinstance(end, Finished) else 0.0

    def _learnt(self, result: StepResult, seconds: float) -> float:
        return seconds


MakeCore = Callable[[Comparison], ReplayedCore]


def replay_steps(records: Iterable[Record], make_core: MakeCore, *, into_crash: bool = False) -> ReplayReport:
    """Run all that was recorded. A step that the recorded engine never finished is run with `into_crash` only."""
    comparison = Comparison()
    core = make_core(comparison)
    begin = time.perf_counter()
    num_requests, last = 0, 0.0
    difference: Difference | None = None
    crashed: Planned | None = None
    suspects: tuple[str, ...] = ()
    try:
        for turn in core.replay(turns(records)):
            num_requests += sum(isinstance(t, Took) and isinstance(t.message, EngineRequest) for t in turn.took)
            last = last if turn.begin is None else turn.begin
            if turn.planned and turn.end is None and not turn.is_last:
                crashed, suspects = turn.planned[-1], tuple(core.scheduler.request_ids)
                if not into_crash:
                    break
    except _StopReplayError as stop:
        difference = stop.difference
    finally:
        core.abort(list(core.scheduler.request_ids))
    return ReplayReport(
        comparison.num_steps,
        num_requests,
        time.perf_counter() - begin,
        last,
        comparison.rolling.value.hex(),
        difference,
        None if crashed is None else crashed.step_id,
        suspects,
    )
