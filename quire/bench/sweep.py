"""`bench sweep`: the same measurement under one load after another, each point saved as soon as it is done."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.bench import charts
from quire.bench.options import ServeOptions, plain_rate
from quire.bench.output import save_page, save_run
from quire.bench.report import write_report
from quire.bench.serve import ServeResult, bench_serve
from quire.bench.stats import Summary
from quire.bench.tables import Grid, sweep_grid
from quire.types.errors import BenchmarkError
from quire.utils.log import get_logger

Varied = Literal["request rate", "concurrency"]

COLUMN: dict[Varied, str] = {"request rate": "sent /s", "concurrency": "in flight"}  # short: the table is wide

logger = get_logger(__name__)


@dataclass(frozen=True)
class Point:
    """One load of a sweep."""

    varied: Varied
    value: float

    @property
    def label(self) -> str:
        return f"{self.value:g}"

    @property
    def name(self) -> str:
        return f"{self.varied.replace(' ', '-')}-{self.label}"

    def apply(self, options: ServeOptions) -> ServeOptions:
        """The options of this point. Its prompts are its own: a prefix cache must not know them from the last one."""
        seed = random.Random(f"{options.data.seed}/{self.name}").randrange(1 << 31)
        if self.varied == "concurrency":
            load = replace(options.load, max_concurrency=int(self.value))
        else:
            load = replace(options.load, request_rate=self.value)
        return replace(options, load=load, data=replace(options.data, seed=seed))


@dataclass(frozen=True)
class SweepResult:
    grid: Grid
    summaries: dict[str, Summary]  # by the point's label
    paths: list[Path]


def run_sweep(
    options: ServeOptions,
    points: list[Point],
    folder: Path,
    environment: dict[str, Any],
    *,
    resume: bool = False,
    bench: Callable[[ServeOptions], ServeResult] = bench_serve,
    say: Callable[[str], None] = logger.info,
) -> SweepResult:
    """Measure every point that is not in `folder` yet, then write the curve over all of them."""
    finished = _finished(options, points, folder, resume)
    for point in points:
        if point.label in finished:
            say(f"{point.varied} {point.label}: done before")
            continue
        say(f"{point.varied} {point.label} ...")
        chosen = point.apply(options)
        result = bench(chosen)
        save_run(folder, point.name, environment, chosen.describe(), result.summary, result.records)
        finished[point.label] = result.summary
    summaries = {point.label: finished[point.label] for point in points}
    varied = points[0].varied
    grid = sweep_grid(COLUMN[varied], summaries.items())
    curve = charts.latency_curve(
        [charts.CurvePoint(label, summary) for label, summary in summaries.items()],
        f"{folder.name}: latency over throughput",
        f"Each point is one {varied}, as labelled",
    )
    paths = save_page(folder, "sweep", [grid], {"curve": curve}, environment)
    results = [
        {"varied": varied, "value": plain_rate(point.value), "summary": summaries[point.label].to_dict()}
        for point in points
    ]
    paths.append(write_report(folder / "sweep.json", environment, results, settings=options.describe()))
    return SweepResult(grid, summaries, paths)


def _finished(options: ServeOptions, points: list[Point], folder: Path, resume: bool) -> dict[str, Summary]:
    """Points that are in the folder already; they must have been measured in the same way."""
    finished: dict[str, Summary] = {}
    for point in points:
        path = folder / f"{point.name}.json"
        if not path.is_file():
            continue
        if not resume:
            raise BenchmarkError(
                f"{path} exists: add --resume to keep what is done, or choose another --experiment-name"
            )
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["settings"] != json.loads(json.dumps(point.apply(options).describe())):
            raise BenchmarkError(
                f"{path} was measured with other settings; give the same ones to --resume, or choose another "
                f"--experiment-name"
            )
        finished[point.label] = msgspec.convert(report["results"]["summary"], Summary)
    return finished
