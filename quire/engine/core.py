"""EngineCore: schedule -> execute -> update, over a few steps in flight. Knows tokens, never text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from quire.sched.scheduler import Scheduler
from quire.types.errors import EngineDeadError, RequestError
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult
from quire.utils.log import get_logger
from quire.worker.executor import Executor

logger = get_logger(__name__)


class EngineCore:
    def __init__(self, scheduler: Scheduler, executor: Executor, steps_in_flight: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._depth = steps_in_flight
        self._in_flight: deque[tuple[StepPlan, Future[StepResult]]] = deque()

    def add_request(self, request: EngineRequest) -> list[EngineOutput]:
        """Queue a request; one that can never run is answered at once with its error."""
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            return [EngineOutput(request.request_id, [], finish_reason="error", error=str(error))]
        return []

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        return self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_unfinished

    def step(self) -> EngineOutputs:
        """Keep the pipeline full, then finish its oldest step. Blocks until that step is done."""
        begin = time.monotonic()
        while len(self._in_flight) < self._depth:
            plan = self.scheduler.schedule(begin)
            if plan is None:
                break
            self._in_flight.append((plan, self.executor.execute(plan)))
        if not self._in_flight:
            if self.scheduler.has_unfinished:
                raise EngineDeadError("the scheduler has requests, but plans none of them; this is a bug in Quire")
            return EngineOutputs([], self.scheduler.stats())
        plan, future = self._in_flight.popleft()
        try:
            result = future.result()
        except Exception as error:  # whatever a step raises must not take the other requests down
            return self._contain(plan, error)
        outputs = self.scheduler.update(plan, result)
        if outputs.stats is not None:
            outputs.stats.step_time = time.monotonic() - begin
        return outputs

    def _contain(self, plan: StepPlan, error: Exception) -> EngineOutputs:
        """A step failed: retry each of its requests alone, so that only the culprit fails."""
        logger.error("step %d with %d requests failed", plan.step_id, len(plan.rows), exc_info=error)
        if self.executor.is_sticky(error):
            raise EngineDeadError(f"the device failed and cannot go on: {error}; restart the engine") from error
        self._in_flight.clear()  # planned on top of the failed step
        if self.scheduler.is_retry(plan):
            return self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
        self.scheduler.recover(plan)
        return EngineOutputs([], self.scheduler.stats())

    def shutdown(self) -> None:
        self.executor.shutdown()
