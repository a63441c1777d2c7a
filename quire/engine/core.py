"""EngineCore: schedule -> execute -> update, over a few steps in flight. Knows tokens, never text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from quire.engine.constraints import Constraints
from quire.sched.scheduler import Scheduler
from quire.types.errors import EngineDeadError, RequestError
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest
from quire.types.step import StepPlan
from quire.utils.log import get_logger
from quire.worker.executor import Executor, StartedStep

logger = get_logger(__name__)


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        steps_in_flight: int,
        constraints: Constraints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.constraints = constraints or Constraints()
        self._depth = steps_in_flight
        self._clock = clock
        self._in_flight: deque[tuple[StepPlan, StartedStep, float]] = deque()  # with the time it was started
        self._last_result = 0.0  # when a step was last known to be done
        self._unmasked = False  # whether the newest step waits for masks before it samples

    def add_request(self, request: EngineRequest) -> list[EngineOutput]:
        """Queue a request; one that can never run is answered at once with its error."""
        try:
            if request.grammar is None:
                self.scheduler.add_request(request)
            else:
                self.scheduler.check(request)
                self.constraints.hold(request)
        except RequestError as error:
            return [refusal(request.request_id, error)]
        return []

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        ids = list(request_ids)
        return self.constraints.abort(ids) + self.scheduler.abort(ids)

    def has_work(self) -> bool:
        """Whether a step would do anything now."""
        return bool(self._in_flight) or self.scheduler.has_unfinished or self.constraints.has_news

    def has_unfinished(self) -> bool:
        """Whether any request will be heard of again; not all of them can run yet."""
        return self.has_work() or self.constraints.is_holding

    def prepare(self) -> bool:
        """Use a moment without work for what steps to come will need; False if there is nothing to do."""
        return not self.has_unfinished() and self.executor.prepare()

    def step(self) -> EngineOutputs:
        """Keep the pipeline full, then finish its oldest step. Blocks until that step is done."""
        begin = self._clock()
        refused = self._admit_held() if self.constraints.has_news else []
        while self._may_plan():
            plan = self.scheduler.schedule(begin)
            if plan is None:
                break
            self._launch(plan)
        if not self._in_flight:
            if self.scheduler.has_unfinished:
                raise EngineDeadError("the scheduler has requests, but plans none of them; this is a bug in Quire")
            return EngineOutputs(refused, self.scheduler.stats())
        self.scheduler.work_ahead()
        plan, future, started = self._in_flight.popleft()
        try:
            result = future.result()
        except Exception as error:  # whatever a step raises must not take the other requests down
            outputs = self._contain(plan, error)
        else:
            outputs = self.scheduler.update(plan, result, self._seconds(started))
            if self.constraints.in_use:
                self.scheduler.finish(self.constraints.follow(outputs.outputs))
            if self._unmasked and len(self._in_flight) == 1:  # its masks need all tokens before it
                self._give_masks(*self._in_flight[0][:2])
            if outputs.stats is not None:
                outputs.stats.step_time = self._clock() - begin
        if refused:
            outputs.outputs[:0] = refused
        return outputs

    def _seconds(self, started: float) -> float:
        """How long the step whose result has just come kept the device: it waited for the one before it."""
        now = self._clock()
        seconds = now - max(started, self._last_result)
        self._last_result = now
        return seconds

    def _may_plan(self) -> bool:
        """Whether another step can be started on top of those in flight. None on one that is known to have failed."""
        if len(self._in_flight) >= self._depth or self._unmasked:
            return False
        if not self._in_flight:
            return True
        newest = self._in_flight[-1][1]
        return not newest.done() or newest.exception() is None

    def _launch(self, plan: StepPlan) -> None:
        """Start a step. Where it samples under grammars and every token before is known, masks are made meanwhile."""
        begin = self._clock()
        if plan.mask_slots and not self._in_flight:
            masks = self.constraints.start_masks(self.scheduler.masked_rows(plan))
            started = self.executor.execute(plan)
            started.sample(masks)
        else:
            started = self.executor.execute(plan)
            self._unmasked = bool(plan.mask_slots)
        self._in_flight.append((plan, started, begin))

    def _give_masks(self, plan: StepPlan, started: StartedStep) -> None:
        started.sample(self.constraints.start_masks(self.scheduler.masked_rows(plan)))
        self._unmasked = False

    def _admit_held(self) -> list[EngineOutput]:
        """Queue the requests whose grammars have been compiled; those whose were not are answered."""
        outputs: list[EngineOutput] = []
        ready, refused = self.constraints.take_ready()
        for request in ready:
            try:
                self.scheduler.add_request(request)
            except RequestError as error:
                self.constraints.forget(request.request_id)
                outputs.append(refusal(request.request_id, error))
        return [*outputs, *(refusal(request_id, error) for request_id, error in refused)]

    def _contain(self, plan: StepPlan, error: Exception) -> EngineOutputs:
        """A step failed: retry each of its requests alone, so that only the culprit fails."""
        logger.error("step %d with %d requests failed", plan.step_id, len(plan.rows), exc_info=error)
        if self.executor.is_sticky(error):
            raise EngineDeadError(f"the device failed and cannot go on: {error}; restart the engine") from error
        self._in_flight.clear()  # planned on top of the failed step
        self._unmasked = False
        if self.scheduler.is_retry(plan):
            outputs = self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
            self.constraints.follow(outputs.outputs)
            return outputs
        self.scheduler.recover(plan)
        return EngineOutputs([], self.scheduler.stats())

    def shutdown(self) -> None:
        self.constraints.shutdown()
        self.executor.shutdown()


def refusal(request_id: str, error: RequestError) -> EngineOutput:
    """The only output of a request that is wrong."""
    return EngineOutput(request_id, [], finish_reason="error", error=str(error), error_field=error.field)
