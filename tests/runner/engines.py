"""Engines whose ways to run steps are looked at, replaced or counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from quire.attention.torch_ref import TorchAttention
from quire.engine.core import EngineCore
from quire.platform.cpu import CpuPlatform
from quire.platform.transfer import Download
from quire.runner import cuda_graphs
from quire.runner.runner import Runner
from quire.runner.sampling.sampler import SamplingKind
from quire.runner.step import Arriving, Step, StepShape
from quire.runner.ways import Way
from quire.worker.inproc import InProcExecutor
from quire.worker.worker import Worker


def worker_of(core: EngineCore) -> Worker:
    assert isinstance(core.executor, InProcExecutor)
    return core.executor._worker


def runner_of(core: EngineCore) -> Runner:
    return worker_of(core).runner


def run_eagerly(core: EngineCore) -> None:
    runner = runner_of(core)
    runner.ways = runner.ways[-1:]


class Spy:
    """A way that notes the shapes of the steps it ran, and of those it did not take."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.ran: list[StepShape] = []
        self.refused: list[StepShape] = []

    @property
    def name(self) -> str:
        return self.way.name

    @property
    def step_sizes(self) -> tuple[int, ...]:
        return self.way.step_sizes

    def forward(self, step: Step) -> bool:
        taken = self.way.forward(step)
        (self.ran if taken else self.refused).append(step.shape)
        return taken

    def sample(self, step: Step) -> None:
        self.way.sample(step)

    def go_on(
        self, rows: list[int], hidden: Tensor | None, kind: SamplingKind, count: int
    ) -> tuple[Arriving, Tensor] | None:
        return self.way.go_on(rows, hidden, kind, count)

    def capture_next(self) -> bool:
        return self.way.capture_next()


def spy_on(core: EngineCore) -> Spy:
    """Watch the first way of an engine."""
    runner = runner_of(core)
    spy = Spy(runner.ways[0])
    runner.ways = [spy, *runner.ways[1:]]
    return spy


class Rerun:
    """A graph pool that captures nothing: a replay runs the work again and leaves its result in the same place."""

    captured = 0

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        Rerun.captured += 1
        out = work().clone()

        def replay() -> None:
            out.copy_(work())

        return replay, out


def capture_steps(monkeypatch: pytest.MonkeyPatch, mixed: tuple[int, ...] = (32, 64)) -> None:
    """Have engines on the CPU capture steps as they would on a GPU: those with Triton's attention, or torch's own."""
    monkeypatch.setattr(TorchAttention, "records", True)

    monkeypatch.setattr(CpuPlatform, "graph_sizes", (1, 2, 4))
    monkeypatch.setattr(CpuPlatform, "mixed_graph_sizes", mixed)
    monkeypatch.setattr(CpuPlatform, "narrow_above", mixed[-1])
    monkeypatch.setattr(CpuPlatform, "graph_pool", lambda self, num_bytes: Rerun(num_bytes))
    # What a replay leaves is copied behind it, as on a GPU: the next may overwrite it before it is read.
    monkeypatch.setattr(cuda_graphs, "Download", lambda tensor: Download(tensor.clone()))
    Rerun.captured = 0
