"""The executor that calls its worker directly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from quire.config.engine import EngineConfig
from quire.runner.runner import RunningStep
from quire.types.errors import EngineDeadError
from quire.types.masks import Masks
from quire.types.request import AdapterRef
from quire.types.step import Returned, StepPlan, StepResult
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase
from quire.utils.turns import Turns
from quire.worker.executor import Executor
from quire.worker.worker import Worker

logger = get_logger(__name__)


class InProcStep:
    """A step that the device may still be computing: asking for the result waits for it.

    Not a Future, whose locks cost more than everything else here: after a step the processor's caches are cold.
    """

    __slots__ = ("_error", "_result", "_running", "_waits")

    def __init__(self, running: RunningStep | None, *, waits: bool = False, error: Exception | None = None) -> None:
        """`waits`: the device is not asynchronous, so that a step is over once it has sampled."""
        self._running, self._waits = running, waits
        self._result: StepResult | None = None
        self._error = error

    def sample(self, masks: Future[Masks]) -> None:
        if self._running is None:  # it failed before it came to sampling
            return
        try:
            self._running.sample(masks.result())
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            self._running, self._error = None, error
            return
        if self._waits:
            self.wait()

    def wait(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            self._result = running.result()
        except Exception as error:  # a failing step is the engine's to contain, whatever it was
            self._error = error

    def done(self) -> bool:
        return self._running is None

    def exception(self) -> BaseException | None:
        self.wait()
        return self._error

    def result(self) -> StepResult:
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class InProcExecutor(Executor):
    def __init__(self, worker: Worker) -> None:
        self.description = worker.description
        self._worker = worker
        self._turns = Turns()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")
        self._prepares = True
        self._prepared: list[float] = []  # seconds that each took

    def execute(self, plan: StepPlan) -> InProcStep:
        waits = not self._worker.platform.asynchronous
        with self._turns.step:
            try:
                step = InProcStep(self._worker.execute(plan), waits=waits)
            except Exception as error:  # a failing step is the engine's to contain, whatever it was
                return InProcStep(None, error=error)
            if waits and not plan.mask_slots:
                step.wait()
            return step

    def learn(self, returned: Sequence[Returned]) -> None:
        self._worker.learn(returned)

    def mask_room(self, count: int) -> Masks:
        return self._worker.runner.sampler.masks.room(count)

    def capture_next(self) -> bool:
        if not self._prepares:
            return False
        begin, prepared = time.perf_counter(), False
        try:
            prepared = self._worker.runner.capture_next()
        except Exception as error:  # the step that needs it will tell, if it ever comes
            logger.warning("preparing for steps to come failed, and is given up", exc_info=error)
            self._prepares = False
        if prepared:
            self._prepared.append(time.perf_counter() - begin)
        elif self._prepared:
            logger.info("%d steps prepared while idle, in %.1f s", len(self._prepared), sum(self._prepared))
            self._prepared.clear()
        return prepared

    def read_adapter(self, ref: AdapterRef) -> Future[int]:
        return self._reader.submit(self._read_adapter, ref)

    def _read_adapter(self, ref: AdapterRef) -> int:
        with self._turns.other():
            return self._worker.runner.adapters.read(ref, self._turns.rest)

    def forget_adapter(self, digest: str) -> None:
        self._worker.adapters.pop(digest, None)

    def sleep(self, level: int) -> Future[str]:
        return self._change(partial(self._worker.sleep, level))

    def wake(self) -> Future[str]:
        return self._change(self._worker.wake)

    def check_weights(self, path: str) -> Future[str]:
        """The digest of weights that `update_weights` would take; QuireError if it would not."""
        return self._reader.submit(self._worker.check_weights, path)

    def update_weights(self, path: str) -> Future[str]:
        return self._change(partial(self._worker.update_weights, path))

    def _change(self, work: Callable[[], str]) -> Future[str]:
        """Beside the engine's loop, which starts no steps meanwhile and goes on hearing messages."""
        self._prepares = True
        return self._reader.submit(work)

    def call_workers(self, call: Callable[[Any], Any]) -> list[Any]:
        with self._turns.step:
            return [call(self._worker)]

    def is_sticky(self, error: Exception) -> bool:
        return isinstance(error, EngineDeadError) or self._worker.platform.is_sticky(error)

    def shutdown(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._worker.shutdown()


def make_inproc_executor(config: EngineConfig, report: ReportPhase) -> InProcExecutor:
    return InProcExecutor(Worker(config, report))
