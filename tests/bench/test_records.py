"""How many requests are in flight, at every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.bench.records import in_flight
from tests.bench.helpers import record


def test_changes_at_the_same_time_are_one() -> None:
    assert in_flight([record(start=0, end=1.0), record(start=1, end=2.0)]) == [(0, 1), (1, 1), (2, 0)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=20))
def test_it_ends_at_zero_and_agrees_with_counting(times: list[list[int]]) -> None:
    changes = in_flight([record(start=start, end=float(end)) for start, end in times])
    assert [count for _, count in changes[-1:]] == [0] * bool(times)
    for time, count in changes:
        assert count == sum(start <= time < end for start, end in times)
