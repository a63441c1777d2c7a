"""Sweeps save each point at once, go on where they stopped, and never mix experiments."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quire.bench.options import DataOptions, ServeOptions
from quire.bench.serve import ServeResult
from quire.bench.stats import summarize
from quire.bench.sweep import Point, SweepResult, run_sweep
from quire.types.errors import BenchmarkError
from tests.bench.helpers import record

POINTS = [Point("concurrency", value) for value in (1, 2, 4)]
ENVIRONMENT = {"date": "today", "machine": {"cpu": "abacus"}}


class Bench:
    """Measures nothing, quickly; stops working when it has been told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.asked: list[ServeOptions] = []
        self.stop_at = stop_at

    def __call__(self, options: ServeOptions) -> ServeResult:
        self.asked.append(options)
        limit = options.load.max_concurrency or 1
        if limit == self.stop_at:
            raise BenchmarkError("the server went away")
        records = [record(start=index, ttft=limit / 10, index=index) for index in range(3)]
        return ServeResult("m", summarize(records), records)


def sweep(folder: Path, bench: Bench, *, resume: bool = False, **data: int) -> SweepResult:
    options = ServeOptions(data=DataOptions(**data))  # type: ignore[arg-type]  # only fields that are integers
    return run_sweep(options, POINTS, folder, ENVIRONMENT, resume=resume, bench=bench, say=lambda text: None)


def test_every_point_is_measured_with_its_load_and_its_own_prompts(tmp_path: Path) -> None:
    bench = Bench()
    result = sweep(tmp_path / "exp", bench)
    assert [options.load.max_concurrency for options in bench.asked] == [1, 2, 4]
    assert len({options.data.seed for options in bench.asked}) == 3
    assert list(result.summaries) == ["1", "2", "4"]
    assert [row[0] for row in result.grid.rows] == ["1", "2", "4"]
    report = json.loads((tmp_path / "exp" / "sweep.json").read_text())
    assert [entry["value"] for entry in report["results"]] == [1, 2, 4]
    names = {path.name for path in (tmp_path / "exp").iterdir()}
    assert {"sweep-curve.svg", "sweep.html", "concurrency-4.json", "concurrency-4-timeline.svg"} <= names


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="went away"):
        sweep(tmp_path, Bench(stop_at=2))
    second = Bench()
    resumed = sweep(tmp_path, second, resume=True)
    assert [options.load.max_concurrency for options in second.asked] == [2, 4]
    third = Bench()
    again = sweep(tmp_path, third, resume=True)
    assert not third.asked
    assert again.summaries == resumed.summaries


def test_a_half_written_point_is_measured_again(tmp_path: Path) -> None:
    sweep(tmp_path, Bench())
    path = tmp_path / "concurrency-2.json"
    path.rename(path.with_name(path.name + ".part"))
    bench = Bench()
    sweep(tmp_path, bench, resume=True)
    assert [options.load.max_concurrency for options in bench.asked] == [2]


def test_without_resume_nothing_is_overwritten(tmp_path: Path) -> None:
    sweep(tmp_path, Bench())
    with pytest.raises(BenchmarkError, match="--resume"):
        sweep(tmp_path, Bench())


def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    sweep(tmp_path, Bench())
    with pytest.raises(BenchmarkError, match="other settings"):
        sweep(tmp_path, Bench(), resume=True, output_len=7)


def test_a_rate_may_be_infinite() -> None:
    point = Point("request rate", math.inf)
    assert point.name == "request-rate-inf"
    assert math.isinf(point.apply(ServeOptions()).load.request_rate)
    assert Point("request rate", 0.5).apply(ServeOptions()).load.request_rate == 0.5
