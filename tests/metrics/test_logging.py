from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from quire.metrics.logging import StatsLog
from quire.metrics.stats import CompletionEnd, RequestEnd, TokenEvent
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineStats
from quire.types.sampling import SamplingParams


class Clock:
    """Time that passes when it is told to, and calls what was asked for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def __call__(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Clock:
        assert self.due is None, "two timers"
        self.due = (self.now + seconds, call)
        return self

    def cancel(self) -> None:
        self.due = None

    def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due is not None and self.due[0] <= end:
            self.now, call = self.due
            self.due = None
            call()
        self.now = end


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO, "quire")
    return Clock()


def make(clock: Clock) -> StatsLog:
    return StatsLog(call_later=clock.call_later, clock=clock)


def ended(*reasons: str) -> RequestEnd:
    completions = tuple(CompletionEnd(reason, 3) for reason in reasons)  # type: ignore[arg-type]  # any reason
    return RequestEnd("r", SamplingParams(), 5, completions, 1.0, 2.0)


def test_a_line_says_what_the_last_ten_seconds_were_like(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = make(clock)
    log.on_tokens(TokenEvent(300, 1000, 500, [0.1, 0.3]))
    log.on_stats(EngineStats(3, 2, 200, 150, 1, 1000, 250, 64, 0.01, prompt_tokens=1000))
    log.on_request_end(ended("stop", "length", "abort"))
    log.on_request_end(ended("error"))
    clock.pass_by(9.9)
    assert caplog.messages == []
    clock.pass_by(0.2)
    assert caplog.messages == [
        "3 running, 2 waiting, KV 25.0 %; prompt 100.0 tok/s, generation 30.0 tok/s; TTFT 0.200 s;"
        " prefix hits 25.0 %; 2 finished, 1 aborted, 1 failed, 1 preempted"
    ]
    fields = vars(caplog.records[0])["fields"]
    assert fields["generation_tokens_per_second"] == 30.0
    assert fields["failed"] == 1


def test_each_line_is_about_its_own_interval(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = make(clock)
    log.on_stats(EngineStats(1, 0, 100, 90, 4, 1000, 500))
    log.on_tokens(TokenEvent(50, 10, 0, [0.1]))
    clock.pass_by(10)
    log.on_stats(EngineStats(1, 0, 100, 80, 4, 1000, 500))
    log.on_tokens(TokenEvent(20, 500, 0, [0.1]))  # a first token brings no prompt tokens: they were counted before
    clock.pass_by(10)
    assert caplog.messages[1:] == [
        "1 running, 0 waiting, KV 20.0 %; prompt 0.0 tok/s, generation 2.0 tok/s; TTFT 0.100 s"
    ]


def test_a_long_prefill_is_counted_as_it_is_computed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = make(clock)
    for step in range(1, 21):  # no token comes out of these
        log.on_stats(
            EngineStats(1, 0, 100, 90, step_time=1.0, prompt_tokens=300 * step, num_prefilling=1,
                        prefill_tokens_left=7000 - 300 * step)
        )  # fmt: skip
        clock.pass_by(1)
    assert caplog.messages == [
        f"1 running (1 in prefill, {left} tokens left), 0 waiting, KV 10.0 %;"
        " prompt 300.0 tok/s, generation 0.0 tok/s"
        for left in (4000, 1000)
    ]


def test_a_step_longer_than_the_interval_is_not_idleness(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = make(clock)
    log.on_stats(EngineStats(1, 2, 100, 90, prompt_tokens=512, num_prefilling=1, prefill_tokens_left=6488))
    clock.pass_by(20)
    assert caplog.messages[1].endswith("generation 0.0 tok/s; no step finished in 10 s")
    log.on_stats(EngineStats(0, 0, 100, 100, prompt_tokens=7000))
    clock.pass_by(60)
    assert len(caplog.messages) == 3, "then nothing runs or waits, and there is nothing to say"


def test_silence_when_nothing_happens_and_no_timer_runs(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = make(clock)
    clock.pass_by(60)
    assert clock.due is None
    log.on_tokens(TokenEvent(5))
    clock.pass_by(60)
    assert len(caplog.messages) == 1
    assert clock.due is None
    log.on_tokens(TokenEvent(40))  # the quiet minute before does not dilute the rate
    clock.pass_by(10)
    assert "generation 4.0 tok/s" in caplog.messages[1]


def test_a_dead_engine_runs_nothing_and_a_new_one_counts_from_zero(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = make(clock)
    log.on_stats(EngineStats(3, 2, 100, 10, 9, 1000, 100))
    clock.pass_by(10)
    log.on_engine_down()
    log.on_request_end(ended("error"))
    clock.pass_by(10)
    assert caplog.messages[1].startswith("0 running, 0 waiting, KV 0.0 %;")
    log.on_engine_start(EngineInfo(10, 10, 16, 100, 8))
    log.on_stats(EngineStats(1, 0, 100, 50, 1, 100, 50))
    clock.pass_by(10)
    assert "prefix hits 50.0 %; 1 preempted" in caplog.messages[2]


def test_close_stops_the_timer(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = make(clock)
    log.on_tokens(TokenEvent(5))
    log.close()
    log.close()
    clock.pass_by(60)
    assert caplog.messages == []


async def test_it_runs_on_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    log = StatsLog(0.001)
    log.on_tokens(TokenEvent(5))
    async with asyncio.timeout(5):
        while not caplog.messages:
            await asyncio.sleep(0)
    log.close()
