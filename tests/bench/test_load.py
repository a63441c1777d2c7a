"""Arrivals follow the rate and the ramp; workers bound the concurrency. In virtual time."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.load import arrival_times, run_load
from quire.bench.options import Arrival
from tests.bench.helpers import run_virtual

RATES = st.floats(0.1, 1000)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrival_times(5, 4, "constant") == [0, 0.25, 0.5, 0.75, 1.0]


def test_an_infinite_rate_is_everything_at_once() -> None:
    assert arrival_times(3, math.inf) == [0, 0, 0]


@given(st.integers(1, 50), RATES, st.sampled_from(["poisson", "constant"]), st.floats(0, 100), st.integers())
def test_arrivals_are_reproducible_ordered_and_start_at_zero(
    count: int, rate: float, arrival: Arrival, ramp: float, seed: int
) -> None:
    times = arrival_times(count, rate, arrival, ramp, seed)
    assert times == arrival_times(count, rate, arrival, ramp, seed)
    assert len(times) == count
    assert times[0] == 0
    assert all(first <= second for first, second in pairwise(times))


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    gaps = [second - first for first, second in pairwise(arrival_times(20_001, 10, "poisson", seed=3))]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert math.sqrt(variance) == pytest.approx(mean, rel=0.05)
    assert arrival_times(5, 10, seed=3) != arrival_times(5, 10, seed=4)


def test_a_ramp_sends_half_as_many_and_then_goes_on_at_the_rate() -> None:
    times = arrival_times(200, 10, "constant", ramp=10)
    assert sum(time < 10 for time in times) == 50
    assert sum(time < 5 for time in times) == pytest.approx(12.5, abs=1)
    assert times[101] - times[100] == pytest.approx(0.1)


class Watcher:
    """Stands for a server that takes `seconds` for each request."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.starts: dict[int, float] = {}
        self.in_flight = 0
        self.peak = 0

    async def send(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        self.starts[index] = round(loop.time(), 9)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1


def test_requests_are_sent_when_they_are_due() -> None:
    watcher = Watcher(10)
    run_virtual(run_load([0, 0.5, 0.5, 2], watcher.send))
    assert watcher.starts == {0: 0, 1: 0.5, 2: 0.5, 3: 2}
    assert watcher.peak == 4


def test_concurrency_is_kept_full_and_never_exceeded() -> None:
    watcher = Watcher(1)
    run_virtual(run_load([0.0] * 7, watcher.send, max_concurrency=3))
    assert sorted(watcher.starts.values()) == [0, 0, 0, 1, 1, 1, 2]
    assert watcher.peak == 3


def test_a_due_request_waits_for_a_slot() -> None:
    watcher = Watcher(2)
    run_virtual(run_load([0, 1, 2, 3], watcher.send, max_concurrency=1))
    assert watcher.starts == {0: 0, 1: 2, 2: 4, 3: 6}


def test_workers_join_one_after_the_other() -> None:
    watcher = Watcher(100)
    run_virtual(run_load([0.0] * 4, watcher.send, max_concurrency=4, ramp=8))
    assert sorted(watcher.starts.values()) == [0, 2, 4, 6]


@given(
    st.lists(st.floats(0, 10), max_size=20).map(sorted),
    st.one_of(st.none(), st.integers(1, 8)),
    st.floats(0, 5),
    st.floats(0, 3),
)
def test_every_request_is_sent_once_and_not_before_its_time(
    due: list[float], limit: int | None, ramp: float, seconds: float
) -> None:
    watcher = Watcher(seconds)
    run_virtual(run_load(due, watcher.send, max_concurrency=limit, ramp=ramp))
    assert sorted(watcher.starts) == list(range(len(due)))
    assert all(watcher.starts[index] >= when - 1e-6 for index, when in enumerate(due))
    assert watcher.peak <= (limit or len(due))
