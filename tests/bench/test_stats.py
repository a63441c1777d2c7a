"""Percentiles, throughput, goodput and failures, from records with known times."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.records import RequestRecord
from quire.bench.stats import distribution, meets, percentile, summarize
from tests.bench.helpers import record

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 95, 99, 100]))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    expected = float(numpy.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, abs=1e-6)


def test_a_distribution_leaves_out_what_was_not_measured() -> None:
    found = distribution([0.1, None, 0.3], 1000)
    assert found is not None
    assert (found.count, found.min, found.max) == (2, 100, pytest.approx(300))
    assert (found.mean, found.p50) == (pytest.approx(200), pytest.approx(200))
    assert distribution([None]) is None


def test_the_measures_of_one_request() -> None:
    one = record(start=2, ttft=0.5, between=0.1, tokens=5)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.1)
    assert one.e2e == pytest.approx(0.9)
    assert record(tokens=1).tpot is None
    assert RequestRecord(index=0, due=1, start=3).delay == 2


def test_throughput_is_over_the_whole_run_and_of_completed_requests() -> None:
    broken = record(start=2, tokens=100, end=10.0, error="timeout")
    summary = summarize([record(start=0, tokens=6), record(start=1, tokens=14), broken])
    assert (summary.completed, summary.failed, summary.failures) == (2, 1, {"timeout": 1})
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 20)
    assert summary.duration_s == 10
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.output_tokens_per_s == pytest.approx(2)
    assert summary.total_tokens_per_s == pytest.approx(4)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.count == 2
    assert summary.itl_ms is not None
    assert summary.itl_ms.count == 5 + 13


def test_peak_in_flight_counts_overlaps_only() -> None:
    one_after_the_other = [record(start=0, end=1.0), record(start=1, end=2.0)]
    assert summarize(one_after_the_other).peak_in_flight == 1
    assert summarize([*one_after_the_other, record(start=0.5, end=1.5)]).peak_in_flight == 2


def test_nothing_measured_is_no_error() -> None:
    summary = summarize([])
    assert (summary.completed, summary.requests_per_s, summary.ttft_ms) == (0, 0, None)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 101}, True),
        ({"ttft": 99}, False),
        ({"tpot": 11, "ttft": 101}, True),
        ({"tpot": 9, "ttft": 101}, False),
        ({"e2e": 141}, True),
        ({"e2e": 139}, False),
    ],
)
def test_a_request_must_meet_every_limit(limits: dict[str, float], good: bool) -> None:
    assert meets(record(), limits) is good
    assert meets(record(error="timeout"), limits) is False


def test_a_measure_that_does_not_exist_breaks_no_limit() -> None:
    assert meets(record(tokens=1), {"tpot": 0.001})


def test_goodput_counts_failures_as_bad() -> None:
    records = [record(), record(ttft=9.96), record(error="http_503"), record()]
    goodput = summarize(records, {"ttft": 200}).goodput
    assert goodput is not None
    assert (goodput.good, goodput.fraction) == (2, 0.5)
    assert goodput.requests_per_s == pytest.approx(0.2)
    assert summarize(records).goodput is None
