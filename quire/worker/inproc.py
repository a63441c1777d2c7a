"""The executor that calls its worker directly."""

from __future__ import annotations

from concurrent.futures import Future

from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor
from quire.worker.worker import Worker


class InProcExecutor(Executor):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._worker.execute(plan))
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            future.set_exception(error)
        return future

    def is_sticky(self, error: Exception) -> bool:
        return self._worker.platform.is_sticky(error)

    def shutdown(self) -> None:
        self._worker.shutdown()
