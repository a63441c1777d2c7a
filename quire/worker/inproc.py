"""The executor that calls its worker directly."""

from __future__ import annotations

from concurrent.futures import Future

from quire.types.masks import Masks
from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor
from quire.worker.runner import Finish
from quire.worker.worker import Worker


class StepFuture(Future[StepResult]):
    """A step that the device may still be computing: asking for the result waits for it."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self._finish: Finish | None = finish

    def result(self, timeout: float | None = None) -> StepResult:
        self.wait()
        return super().result(timeout)

    def wait(self) -> None:
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        try:
            self.set_result(finish())
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            self.set_exception(error)

    def fail(self, error: Exception) -> None:
        """It will never be done."""
        self._finish = None
        self.set_exception(error)


class InProcExecutor(Executor):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._unsampled: StepFuture | None = None  # the newest step, if it waits for masks

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self._unsampled = None
        try:
            future = StepFuture(self._worker.execute(plan))
            if plan.mask_slots:
                self._unsampled = future
            elif not self._worker.platform.asynchronous:
                future.wait()
            return future
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def sample(self, masks: Future[Masks]) -> None:
        future, self._unsampled = self._unsampled, None
        if future is None:  # it failed before it came to sampling
            return
        try:
            self._worker.sample(masks.result())
            if not self._worker.platform.asynchronous:
                future.wait()
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            future.fail(error)

    def is_sticky(self, error: Exception) -> bool:
        return self._worker.platform.is_sticky(error)

    def shutdown(self) -> None:
        self._worker.shutdown()
