"""The in-process executor: a step's exception is in its future, never raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.types.step import StepPlan, StepResult
from quire.worker.inproc import InProcExecutor

PLAN = StepPlan(0, [], [])


def make(execute: Any) -> tuple[InProcExecutor, list[str]]:
    calls: list[str] = []
    worker: Any = SimpleNamespace(
        execute=execute,
        shutdown=lambda: calls.append("shutdown"),
        platform=SimpleNamespace(is_sticky=lambda error: isinstance(error, SystemError)),
    )
    return InProcExecutor(worker), calls


def test_a_result_is_there_at_once() -> None:
    executor, _ = make(lambda plan: StepResult(plan.step_id, [[1]]))
    future = executor.execute(PLAN)
    assert future.done()
    assert future.result() == StepResult(0, [[1]])


def test_an_exception_waits_in_the_future() -> None:
    def fail(plan: StepPlan) -> StepResult:
        raise RuntimeError("out of luck")

    executor, _ = make(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        executor.execute(PLAN).result()


def test_an_interrupt_is_not_a_failing_step() -> None:
    def interrupt(plan: StepPlan) -> StepResult:
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
