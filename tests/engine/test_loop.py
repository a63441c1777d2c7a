"""The loop: sleeps without work, misses no wake-up, and stops at once or after its work."""

from __future__ import annotations

import threading
import time

import pytest

from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.types.messages import Command, Reply
from quire.types.outputs import EngineOutput, EngineOutputs
from tests.engine.test_core import Device, make_core, request


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


class Preparing(Device):
    """Has so many things to prepare, and notes when it does."""

    def __init__(self, device: Device, count: int) -> None:
        super().__init__(device.fake)
        self.left, self.done = count, threading.Event()
        self.noted: list[int] = []

    def capture_next(self) -> bool:
        if not self.left:
            self.done.set()
            return False
        self.left -= 1
        self.noted.append(self.left)
        return True


def make_preparing(count: int) -> tuple[EngineCore, Preparing]:
    core = make_core()[0]
    assert isinstance(core.executor, Device)
    core.executor = device = Preparing(core.executor, count)
    return core, device


def test_an_idle_loop_prepares_until_all_is_done_and_then_sleeps() -> None:
    core, device = make_preparing(5)
    loop = EngineLoop(core, debug_checks=True, quiet=0.01)
    thread = threading.Thread(target=run, args=(loop,))
    thread.start()
    assert device.done.wait(20)
    loop.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert device.noted == [4, 3, 2, 1, 0]


def test_a_command_prepares_one_thing_and_nothing_while_there_is_work() -> None:
    core, device = make_preparing(2)
    ask = Command(1, "capture_next", None)
    core.add_request(request("a", max_tokens=1))
    assert obey(core, ask) == Reply(1, False)
    while core.has_work():
        core.step()
    assert [obey(core, ask).value for _ in range(3)] == [True, True, False]
    assert device.noted == [1, 0]


def test_work_comes_before_what_is_left_to_prepare() -> None:
    core, device = make_preparing(1000)
    loop = EngineLoop(core, debug_checks=True, quiet=0.0)
    loop.submit(request("a", max_tokens=5))
    loop.stop(finish_work=True)
    results = run(loop)
    assert sum(len(output.token_ids) for result in results for output in result.outputs) == 5
    assert device.noted == []


def test_requests_that_follow_each_other_do_not_meet_preparations() -> None:
    core, device = make_preparing(1000)
    loop = EngineLoop(core, debug_checks=True, quiet=20.0)
    thread = threading.Thread(target=run, args=(loop,))
    thread.start()
    for number in range(20):
        loop.submit(request(str(number), max_tokens=5))
        time.sleep(0.01)
    loop.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert device.noted == []


def test_a_known_answer_goes_out_with_the_next_step() -> None:
    loop = make_loop()
    answer = EngineOutput("refused", [], finish_reason="error", error="why")
    loop.submit(answer)
    assert loop.has_work()
    assert loop.run_once().outputs == [answer]
    assert not loop.has_work()
