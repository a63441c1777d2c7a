"""The tables say what was measured, and only that."""

from __future__ import annotations

from quire.bench.stats import summarize
from quire.bench.tables import figures, summary_grids, sweep_grid
from tests.bench.helpers import record


def test_figures_tell_failures_by_kind_caching_and_goodput() -> None:
    records = [record(cached_tokens=4), record(ttft=9.96), record(error="timeout")]
    rows = dict(figures(summarize(records, {"ttft": 200})))
    assert rows["requests completed"] == "2"
    assert rows["requests failed"] == "1"
    assert rows["  timeout"] == "1"
    assert rows["prompt tokens"] == "20 (4 from the prefix cache)"
    assert rows["goodput (ttft 200 ms)"] == "0.10 requests/s, 33.3% of all"


def test_latencies_have_mean_percentiles_and_maximum() -> None:
    _, latencies = summary_grids(summarize([record(ttft=0.1), record(ttft=0.3)]))
    assert latencies.header == ["latency, ms", "mean", "p50", "p90", "p95", "p99", "max"]
    rows = {row[0]: row[1:] for row in latencies.rows}
    assert rows["TTFT (first token)"] == ("200.0", "200.0", "280.0", "290.0", "298.0", "300.0")
    assert rows["TPOT (per token)"][0] == "10.00"
    assert "sent late by" not in rows


def test_lateness_is_shown_when_it_matters_and_absent_measures_are_not() -> None:
    late = record(start=1, due=0.0, tokens=1)
    names = [row[0] for row in summary_grids(summarize([late]))[1].rows]
    assert names == ["TTFT (first token)", "E2E (whole request)", "sent late by"]


def test_a_sweep_has_a_line_per_point_and_columns_only_where_needed() -> None:
    plain = sweep_grid("in flight", [("1", summarize([record()]))])
    assert "failed" not in plain.header
    assert "good" not in plain.header
    full = sweep_grid("in flight", [("1", summarize([record(), record(error="x")], {"ttft": 200}))])
    assert (full.header[-2:], full.rows[0][-2:]) == (["failed", "good"], ("1", "50%"))
    assert all(len(row) == len(grid.header) for grid in (plain, full) for row in grid.rows)
