"""EngineCore: schedule -> execute -> update, over a few steps in flight. Knows tokens, never text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from quire.engine.constraints import Constraints
from quire.engine.hold import Hold
from quire.engine.parked import Condition, ParkedRequests, refusal
from quire.engine.step_log import NO_LOG, StepLog
from quire.kv.stream import CacheStream
from quire.sched.scheduler import Scheduler
from quire.sched.state import InFlight
from quire.types.console import Memory
from quire.types.errors import EngineDeadError, RequestError
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.types.step import MaskedRow, StepPlan, StepResult
from quire.utils.log import get_logger
from quire.worker.executor import Executor

logger = get_logger(__name__)


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        steps_in_flight: int,
        constraints: Constraints | None = None,
        clock: Callable[[], float] = time.monotonic,
        conditions: Sequence[Condition] = (),
        log: StepLog = NO_LOG,
        memory: Memory | None = None,
    ) -> None:
        """`conditions` is what requests may have to wait for, besides their grammars; `memory` is for the console."""
        self.log = log
        self.watch: StepLog = NO_LOG  # hears of results once they are applied, while somebody looks at the console
        self.cache_stream: CacheStream | None = None  # tells a router what is cached
        self.memory = memory or Memory()
        self.scheduler = scheduler
        self.executor = executor
        self.constraints = constraints or Constraints()
        self.parked = ParkedRequests([self.constraints, *conditions])
        self.parked.on_taken = log.ready
        self.hold = Hold(self)
        self._said: list[EngineOutput] = []  # goes out with the next step
        self._depth = steps_in_flight
        self._clock = clock
        self._last_result = 0.0  # when a step was last known to be done
        log.attach(self)

    def add_request(self, request: EngineRequest) -> list[EngineOutput]:
        """Queue or park a request; one that can never run is answered at once with its error."""
        if self.hold.takes(request):
            return []
        try:
            if self.parked.must_wait(request):
                self.scheduler.check(request)
                self.parked.park(request)
            else:
                self.scheduler.add_request(request)
        except RequestError as error:
            return [refusal(request.request_id, error)]
        return []

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        ids = list(request_ids)
        return self.parked.abort(ids) + self.scheduler.abort(ids) + self.hold.abort(ids)

    def abort_all(self) -> None:
        """End every request; the next step tells so."""
        self.say(self.abort([*self.scheduler.request_ids, *self.parked.request_ids]))

    def say(self, outputs: list[EngineOutput]) -> None:
        """Let outputs go out with the next step."""
        self._said += outputs

    def finish_steps(self) -> None:
        """Wait for the steps in flight, while the engine is held; the next step tells what they gave."""
        while self._in_flight:
            self._said = self.step().outputs

    def has_work(self) -> bool:
        """Whether a step would do anything now."""
        if self._in_flight or self.parked.has_news or self._said or self.hold.has_news:
            return True
        if self.executor.failure is not None:
            return True
        return self.scheduler.has_unfinished and not self.hold.is_active

    def has_unfinished(self) -> bool:
        """Whether any request will be heard of again; not all of them can run yet."""
        return self.has_work() or bool(self.parked) or self.scheduler.has_unfinished or self.hold.num_late > 0

    def capture_next(self) -> bool:
        """Use a moment without work for what steps to come will need; False if there is nothing to do."""
        return not self.has_unfinished() and not self.hold.is_active and self.executor.capture_next()

    def stats(self, step_time: float = 0.0) -> EngineStats:
        return self.scheduler.stats(num_parked=len(self.parked) + self.hold.num_late, step_time=step_time)

    def watch_cache(self) -> None:
        self.cache_stream = CacheStream(self.scheduler.kv)

    def check_integrity(self) -> None:
        """Raise AssertionError if the parts disagree. Slow: for tests."""
        self.scheduler.check_integrity()
        self.parked.check_integrity(self.scheduler.request_ids)

    def step(self) -> EngineOutputs:
        """Keep the pipeline full, then finish its oldest step. Blocks until that step is done."""
        begin = self._clock()
        if self.executor.failure is not None:
            raise EngineDeadError(str(self.executor.failure)) from self.executor.failure
        self.log.begin(begin)
        refused = self._admit_parked() if self.parked.has_news else []
        if self.hold.has_news:
            self.hold.advance()
        if self._said:
            refused, self._said = self._said + refused, []
        while self._may_plan():
            plan = self.scheduler.schedule(begin)
            if plan is None:
                break
            self._launch(plan)
        if not self._in_flight:
            if self.scheduler.has_unfinished and not self.hold.is_active:
                raise EngineDeadError("the scheduler has requests, but plans none of them; this is a bug in Quire")
            return EngineOutputs(refused, self.stats())
        self.scheduler.work_ahead()
        oldest = self._in_flight[0]
        assert oldest.handle is not None, "a step was planned and not started"
        asked = self._clock()
        try:
            result = oldest.handle.result()
        except Exception as error:  # whatever a step raises must not take the other requests down
            outputs = self._contain(oldest, error)
            self.parked.note_ends(outputs)
            return EngineOutputs([*refused, *outputs], self.stats())
        seconds = self._seconds(oldest.started, begin, asked)
        learnt = self._learnt(result, seconds)
        self.log.finished(oldest.plan, result, learnt)
        outputs = self.scheduler.update(oldest.plan, result, learnt)
        self.watch.finished(oldest.plan, result, seconds)
        if self.constraints.in_use:
            self.scheduler.finish(self.constraints.follow(outputs))
        self.parked.note_ends(outputs)
        if len(self._in_flight) == 1 and self._in_flight[0].needs_masks:  # they need all tokens before it
            self._give_masks(self._in_flight[0])
        stats = self.stats(self._clock() - begin)
        if result.expert_load:
            stats = msgspec.structs.replace(stats, expert_load=result.expert_load)
        return EngineOutputs([*refused, *outputs] if refused else outputs, stats)

    def _seconds(self, started: float, begin: float, asked: float) -> float:
        """How long the step whose result has just come kept the device: it waited for the one before it.

        If another was launched since `begin` and its own result was there when it was asked for, it ended meanwhile:
        kernel by kernel a launch takes longer than many a step, and counts for what was launched.
        """
        now, launched = self._clock(), self._in_flight[-1].started
        if started < launched >= begin and now - asked < (asked - launched) / 4:
            now = launched
        seconds = max(0.0, now - max(started, self._last_result))
        self._last_result = now
        return seconds

    def _learnt(self, result: StepResult, seconds: float) -> float:
        """What the time of a step says of steps like it: nothing, 0, if a part of it had to be captured first."""
        return 0.0 if result.captured else seconds

    def _may_plan(self) -> bool:
        """Whether another step can be started on top of those in flight. None on one that is known to have failed."""
        if not self._in_flight:
            return not self.hold.is_active
        newest = self._in_flight[-1]
        if len(self._in_flight) >= self._depth or newest.needs_masks or self.hold.is_active:
            return False
        handle = newest.handle
        return handle is None or not handle.done() or handle.exception() is None

    def _launch(self, plan: StepPlan) -> None:
        """Start a step. Where it samples under grammars and every token before is known, masks are made meanwhile."""
        newest = self._in_flight[-1]
        newest.started = self._clock()
        self.log.planned(plan)
        self.watch.planned(plan)
        if plan.mask_slots and (len(self._in_flight) == 1 or self.scheduler.awaits_tokens):
            masks = self.constraints.start_masks(_masked_rows(newest))
            newest.handle = self.executor.execute(plan)
            newest.handle.sample(masks)
        else:
            newest.handle = self.executor.execute(plan)
            newest.needs_masks = bool(plan.mask_slots)

    def _give_masks(self, newest: InFlight) -> None:
        assert newest.handle is not None
        newest.handle.sample(self.constraints.start_masks(_masked_rows(newest)))
        newest.needs_masks = False

    @property
    def _in_flight(self) -> deque[InFlight]:
        """The steps whose results are to come, the oldest first. The scheduler adds and takes them."""
        return self.scheduler.state.in_flight

    def _admit_parked(self) -> list[EngineOutput]:
        """Queue the parked requests that have what they waited for; those that cannot have it are answered."""
        ready, refused = self.parked.take_ready()
        for request in ready:
            self.scheduler.add_request(request)
        return refused

    def _contain(self, failed: InFlight, error: Exception) -> list[EngineOutput]:
        """A step failed: retry each of its requests alone, so that only the culprit fails."""
        plan = failed.plan
        self.log.failed(plan, error)
        logger.error("step %d with %d requests failed", plan.step_id, len(plan.rows), exc_info=error)
        if self.executor.is_sticky(error):
            raise EngineDeadError(f"the device failed and cannot go on: {error}; restart the engine") from error
        if failed.retry:
            return self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
        self.scheduler.recover(plan)
        return []

    def shutdown(self) -> None:
        self.log.close()
        self.parked.shutdown()
        self.executor.shutdown()


def _masked_rows(step: InFlight) -> list[MaskedRow]:
    """What the plan's mask_slots are about, in their order; some requests may have ended since it was planned."""
    return [
        MaskedRow(request.request_id, step.drafts.get(index, ()))
        for index, (row, request) in enumerate(zip(step.plan.rows, step.requests, strict=True))
        if row in step.plan.mask_slots
    ]
