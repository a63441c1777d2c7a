"""Stages of a pipeline in one process, one after the other: their runners without processes between them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from torch import Tensor

from quire.config.engine import EngineConfig
from quire.parallel.pipeline import Link, Pipeline
from quire.runner.runner import RunningStep
from quire.types.masks import Masks
from quire.types.step import Returned, StepPlan, StepResult
from quire.utils.phases import ReportPhase
from quire.worker.executor import Executor
from quire.worker.worker import Worker


class LocalLink(Link):
    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()

    def send(self, x: Tensor) -> None:
        self._sent.append(x.clone())

    def receive(self, out: Tensor) -> bool:
        out.copy_(self._sent.popleft())
        return True


class BothEnds(Link):
    def __init__(self, before: Link, after: Link) -> None:
        self._before, self._after = before, after

    def send(self, x: Tensor) -> None:
        self._after.send(x)

    def receive(self, out: Tensor) -> bool:
        return self._before.receive(out)


class LocalStep:
    def __init__(self, executor: StagesInOneProcess, running: list[RunningStep]) -> None:
        self._executor, self._running = executor, running
        self._result: StepResult | None = None

    def sample(self, masks: Future[Masks]) -> None:
        self._running[-1].sample(masks.result())
        self._executor.settle(self._running[-1])

    def done(self) -> bool:
        return self._result is not None

    def exception(self) -> None:
        self.result()

    def result(self) -> StepResult:
        if self._result is None:
            self._result = found = self._running[-1].result()
            self._executor.returned.append(Returned(found.step_id, found.token_ids, list(found.errors)))
        return self._result


class StagesInOneProcess(Executor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        size = config.parallel.pipeline_parallel_size
        links = [LocalLink() for _ in range(size)]
        self.workers = [
            Worker(config, report, None, Pipeline(stage, size, None, BothEnds(links[stage - 1], links[stage])))
            for stage in range(size)
        ]
        self.description = self.workers[-1].description
        self.returned: list[Returned] = []
        self.ways: list[set[str]] = [set() for _ in range(size)]  # by which the steps of each stage ran

    def execute(self, plan: StepPlan) -> LocalStep:
        returned, self.returned = self.returned, []
        running = []
        for worker, ways in zip(self.workers, self.ways, strict=True):
            worker.learn(returned)
            step = worker.execute(plan)
            ways.add(step._step.way)
            running.append(step)
        if not plan.mask_slots:
            self.settle(running[-1])
        return LocalStep(self, running)

    def settle(self, step: RunningStep) -> None:
        """As executors do: where the device is not asynchronous, the next step may use the memory of this one."""
        if not self.workers[-1].platform.asynchronous:
            step.settle()

    def capture_next(self) -> bool:
        prepared = [worker.runner.capture_next() for worker in self.workers]
        return any(prepared)

    def is_sticky(self, error: Exception) -> bool:
        return False

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
