"""The in-process executor: a step's exception is in its future, never raised."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.types.step import StepPlan, StepResult
from quire.worker.inproc import InProcExecutor

PLAN = StepPlan(0, [], [])


class Running:
    """A started step with a scripted end."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish = finish

    def result(self) -> StepResult:
        return self._finish()


def make(execute: Any, asynchronous: bool = False) -> tuple[InProcExecutor, list[str]]:
    calls: list[str] = []
    worker: Any = SimpleNamespace(
        execute=execute,
        description=None,
        shutdown=lambda: calls.append("shutdown"),
        platform=SimpleNamespace(is_sticky=lambda error: isinstance(error, SystemError), asynchronous=asynchronous),
    )
    return InProcExecutor(worker), calls


def test_a_result_is_there_at_once() -> None:
    executor, _ = make(lambda plan: Running(lambda: StepResult(plan.step_id, [[1]])))
    future = executor.execute(PLAN)
    assert future.done()
    assert future.result() == StepResult(0, [[1]])


def test_a_queued_step_is_finished_once_and_when_it_is_asked_for() -> None:
    finished = []

    def execute(plan: StepPlan) -> Running:
        def finish() -> StepResult:
            finished.append(plan.step_id)
            return StepResult(plan.step_id, [[1]])

        return Running(finish)

    executor, _ = make(execute, asynchronous=True)
    future = executor.execute(PLAN)
    assert finished == []
    assert future.result() == future.result() == StepResult(0, [[1]])
    assert finished == [0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_at_the_end_of_a_step_waits_in_the_future(asynchronous: bool) -> None:
    def finish() -> StepResult:
        raise RuntimeError("out of luck")

    executor, _ = make(lambda plan: Running(finish), asynchronous)
    future = executor.execute(PLAN)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            future.result()


def test_an_exception_waits_in_the_future() -> None:
    def fail(plan: StepPlan) -> Running:
        raise RuntimeError("out of luck")

    executor, _ = make(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        executor.execute(PLAN).result()


def test_an_interrupt_is_not_a_failing_step() -> None:
    def interrupt(plan: StepPlan) -> Running:
        raise KeyboardInterrupt

    executor, _ = make(interrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.execute(PLAN)


def test_the_platform_knows_what_is_sticky() -> None:
    executor, calls = make(None)
    assert executor.is_sticky(SystemError())
    assert not executor.is_sticky(RuntimeError())
    executor.shutdown()
    assert calls == ["shutdown"]


def make_preparing(prepare: Callable[[], bool]) -> InProcExecutor:
    worker: Any = SimpleNamespace(runner=SimpleNamespace(capture_next=prepare), description=None)
    return InProcExecutor(worker)


def test_preparing_ends_when_all_is_prepared_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Until requests of another kind have come: then there may be more."""
    left = iter([True, True, False, False, False, True, False])
    executor = make_preparing(lambda: next(left))
    with caplog.at_level("INFO", logger="quire"):
        assert [executor.capture_next() for _ in range(7)] == [True, True, False, False, False, True, False]
    said = [record.message.split(",")[0] for record in caplog.records]
    assert said == ["2 steps prepared while idle", "1 steps prepared while idle"]


def test_preparing_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def prepare() -> bool:
        calls.append(1)
        raise RuntimeError("no room")

    executor = make_preparing(prepare)
    assert [executor.capture_next() for _ in range(3)] == [False, False, False]
    assert len(calls) == 1
    assert "given up" in caplog.text
