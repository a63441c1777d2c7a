"""The executor that calls its worker directly."""

from __future__ import annotations

import time
from concurrent.futures import Future

from quire.types.masks import Masks
from quire.types.step import StepPlan, StepResult
from quire.utils.log import get_logger
from quire.worker.executor import Executor
from quire.worker.runner import Finish
from quire.worker.worker import Worker

logger = get_logger(__name__)


class InProcStep:
    """A step that the device may still be computing: asking for the result waits for it.

    Not a Future, whose locks cost more than everything else here: after a step the processor's caches are cold.
    """

    __slots__ = ("_error", "_finish", "_result")

    def __init__(self, finish: Finish | None, error: Exception | None = None) -> None:
        self._finish = finish
        self._result: StepResult | None = None
        self._error = error

    def wait(self) -> None:
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        try:
            self._result = finish()
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            self._error = error

    def done(self) -> bool:
        return self._finish is None

    def exception(self) -> BaseException | None:
        self.wait()
        return self._error

    def result(self) -> StepResult:
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def fail(self, error: Exception) -> None:
        """It will never be done."""
        self._finish, self._error = None, error


class InProcExecutor(Executor):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._unsampled: InProcStep | None = None  # the newest step, if it waits for masks
        self._prepares = True
        self._prepared: list[float] = []  # seconds that each took

    def execute(self, plan: StepPlan) -> InProcStep:
        self._unsampled = None
        try:
            step = InProcStep(self._worker.execute(plan))
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            return InProcStep(None, error)
        if plan.mask_slots:
            self._unsampled = step
        elif not self._worker.platform.asynchronous:
            step.wait()
        return step

    def sample(self, masks: Future[Masks]) -> None:
        step, self._unsampled = self._unsampled, None
        if step is None:  # it failed before it came to sampling
            return
        try:
            self._worker.sample(masks.result())
            if not self._worker.platform.asynchronous:
                step.wait()
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            step.fail(error)

    def prepare(self) -> bool:
        if not self._prepares:
            return False
        begin = time.perf_counter()
        try:
            self._prepares = self._worker.prepare()
        except Exception as error:  # the step that needs it will tell, if it ever comes
            logger.warning("preparing for steps to come failed, and is given up", exc_info=error)
            self._prepares = False
        self._prepared.append(time.perf_counter() - begin)
        if not self._prepares and len(self._prepared) > 1:
            logger.info("%d steps prepared while idle, in %.1f s", len(self._prepared) - 1, sum(self._prepared))
        return self._prepares

    def is_sticky(self, error: Exception) -> bool:
        return self._worker.platform.is_sticky(error)

    def shutdown(self) -> None:
        self._worker.shutdown()
