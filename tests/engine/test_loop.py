"""The loop: sleeps without work, misses no wake-up, and stops at once or after its work."""

from __future__ import annotations

import threading

import pytest

from quire.engine.loop import EngineLoop
from quire.types.outputs import EngineOutput, EngineOutputs
from tests.engine.test_core import make_core, request


def make_loop() -> EngineLoop:
    return EngineLoop(make_core()[0], debug_checks=True)


def run(loop: EngineLoop) -> list[EngineOutputs]:
    results = []
    while loop.wait():
        results.append(loop.run_once())
    return results


def test_a_stop_that_came_before_the_wait_is_not_lost() -> None:
    loop = make_loop()
    loop.submit(request("a"))
    loop.stop()
    assert run(loop) == []


def test_finishing_runs_what_is_there_and_then_stops() -> None:
    loop = make_loop()
    loop.submit(request("a", max_tokens=5))
    loop.stop(finish_work=True)
    results = run(loop)
    assert sum(len(output.token_ids) for result in results for output in result.outputs) == 5
    assert results[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("finish_work", [True, False])
def test_an_idle_loop_is_woken_to_stop(finish_work: bool) -> None:
    for _ in range(200):  # the stop meets the loop at any point of its wait
        loop = make_loop()
        thread = threading.Thread(target=run, args=(loop,))
        thread.start()
        loop.stop(finish_work=finish_work)
        thread.join(20)
        assert not thread.is_alive()


def test_a_known_answer_goes_out_with_the_next_step() -> None:
    loop = make_loop()
    answer = EngineOutput("refused", [], finish_reason="error", error="why")
    loop.submit(answer)
    assert loop.has_work()
    assert loop.run_once().outputs == [answer]
    assert not loop.has_work()
