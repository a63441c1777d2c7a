"""The in-process executor: a step's exception is in its future, never raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.types.step import StepPlan, StepResult
from quire.worker.inproc import InProcExecutor
from quire.worker.runner import Finish

PLAN = StepPlan(0, [], [])


def make(execute: Any, asynchronous: bool = False) -> tuple[InProcExecutor, list[str]]:
    calls: list[str] = []
    worker: Any = SimpleNamespace(
        execute=execute,
        shutdown=lambda: calls.append("shutdown"),
        platform=SimpleNamespace(is_sticky=lambda error: isinstance(error, SystemError), asynchronous=asynchronous),
    )
    return InProcExecutor(worker), calls


def test_a_result_is_there_at_once() -> None:
    executor, _ = make(lambda plan: lambda: StepResult(plan.step_id, [[1]]))
    future = executor.execute(PLAN)
    assert future.done()
    assert future.result() == StepResult(0, [[1]])


def test_a_queued_step_is_finished_once_and_when_it_is_asked_for() -> None:
    finished = []

    def execute(plan: StepPlan) -> Finish:
        def finish() -> StepResult:
            finished.append(plan.step_id)
            return StepResult(plan.step_id, [[1]])

        return finish

    executor, _ = make(execute, asynchronous=True)
    future = executor.execute(PLAN)
    assert finished == []
    assert future.result() == future.result() == StepResult(0, [[1]])
    assert finished == [0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_at_the_end_of_a_step_waits_in_the_future(asynchronous: bool) -> None:
    def finish() -> StepResult:
        raise RuntimeError("out of luck")

    executor, _ = make(lambda plan: finish, asynchronous)
    future = executor.execute(PLAN)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            future.result()


def test_an_exception_waits_in_the_future() -> None:
    def fail(plan: StepPlan) -> Finish:
        raise RuntimeError("out of luck")

    executor, _ = make(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        executor.execute(PLAN).result()


def test_an_interrupt_is_not_a_failing_step() -> None:
    def interrupt(plan: StepPlan) -> Finish:
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
