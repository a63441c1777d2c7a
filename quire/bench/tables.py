"""The tables that people read at the end of a benchmark, as cells of text, and how they look on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.bench.embed import EmbedSummary
from quire.bench.offline import LatencySummary
from quire.bench.startup import StartupSummary
from quire.bench.stats import PERCENTILES, Distribution, Summary

MEASURES = {
    "ttft_ms": "TTFT (first token)",
    "tpot_ms": "TPOT (per token)",
    "itl_ms": "ITL (between chunks)",
    "e2e_ms": "E2E (whole request)",
}
LATE_MS = 5.0  # p99 of the delay in sending, above which the table has a warning


@dataclass
class Grid:
    """A table before it is drawn; the first column names the rows."""

    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


def print_grids(title: str, grids: Iterable[Grid]) -> None:
    from rich.console import Console  # here, so that --help and JSON need not wait for it
    from rich.table import Table

    console = Console()
    console.print(title, style="bold", highlight=False)
    for grid in grids:
        table = Table()
        for index, name in enumerate(grid.header):
            table.add_column(name, justify="right" if index else "left")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


def summary_grids(summary: Summary) -> list[Grid]:
    """What was done and how fast, then the latencies."""
    latencies = _latency_grid()
    for name, label in MEASURES.items():
        _add(latencies, label, getattr(summary, name))
    if summary.delay_ms is not None and summary.delay_ms.p99 >= LATE_MS:
        _add(latencies, "sent late by", summary.delay_ms)
    return [Grid(["result", ""], figures(summary)), latencies]


def figures(summary: Summary) -> list[Sequence[str]]:
    cached = f" ({summary.cached_tokens} from the prefix cache)" if summary.cached_tokens else ""
    rows: list[Sequence[str]] = [
        ("requests completed", str(summary.completed)),
        ("requests failed", str(summary.failed)),
        *((f"  {kind}", str(count)) for kind, count in summary.failures.items()),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("prompt tokens", f"{summary.prompt_tokens}{cached}"),
        ("output tokens", f"{summary.output_tokens}{' (chunks counted)' if summary.counted_chunks else ''}"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{summary.total_tokens_per_s:.1f}"),
        ("most in flight", str(summary.peak_in_flight)),
    ]
    if summary.goodput is not None:
        good = summary.goodput
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in good.limits_ms.items())
        rows.append((f"goodput ({limits})", f"{good.requests_per_s:.2f} requests/s, {good.fraction:.1%} of all"))
    return rows


def latency_grids(summary: LatencySummary) -> list[Grid]:
    grid = _latency_grid()
    _add(grid, "batch", summary.batch_ms)
    _add(grid, MEASURES["ttft_ms"], summary.ttft_ms)
    _add(grid, MEASURES["tpot_ms"], summary.tpot_ms)
    return [Grid(["result", ""], [("output tokens/s", f"{summary.output_tokens_per_s:.1f}")]), grid]


def embed_grids(summary: EmbedSummary) -> list[Grid]:
    grid = _latency_grid()
    _add(grid, "batch", summary.batch_ms)
    rates = Grid(["result", ""])
    rates.rows += [("texts/s", f"{summary.texts_per_s:.1f}"), ("tokens/s", f"{summary.tokens_per_s:.0f}")]
    return [rates, grid]


def startup_grids(summary: StartupSummary) -> list[Grid]:
    grid = Grid(["start-up, s", "min", "median", "max"])
    for name, phase in [*summary.phases_ms.items(), ("total", summary.total_ms)]:
        grid.rows.append((name, *(f"{value / 1000:.3f}" for value in (phase.min, phase.p50, phase.max))))
    return [grid]


def sweep_grid(varied: str, points: Iterable[tuple[str, Summary]]) -> Grid:
    """One line per point, latencies in milliseconds; `varied` is what the points differ in."""
    pairs = list(points)
    header = [varied, "req/s", "out tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50"]
    any_failed = any(point.failed for _, point in pairs)
    any_limits = any(point.goodput is not None for _, point in pairs)
    grid = Grid([*header, *["failed"] * any_failed, *["good"] * any_limits])
    for label, point in pairs:
        share = "" if point.goodput is None else f"{point.goodput.fraction:.0%}"
        grid.rows.append(
            (
                label,
                f"{point.requests_per_s:.2f}",
                f"{point.output_tokens_per_s:.1f}",
                *_percents(point.ttft_ms),
                *_percents(point.tpot_ms),
                "" if point.e2e_ms is None else _milliseconds(point.e2e_ms.p50),
                *[str(point.failed)] * any_failed,
                *[share] * any_limits,
            )
        )
    return grid


def _latency_grid() -> Grid:
    return Grid(["latency, ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max"])


def _add(grid: Grid, name: str, found: Distribution | None) -> None:
    if found is not None:
        points = (found.mean, *(getattr(found, f"p{percent}") for percent in PERCENTILES), found.max)
        grid.rows.append((name, *(_milliseconds(point) for point in points)))


def _milliseconds(value: float) -> str:
    """Four or five figures: more are noise, and a terminal is narrow."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _percents(found: Distribution | None) -> tuple[str, str]:
    return ("", "") if found is None else (_milliseconds(found.p50), _milliseconds(found.p99))
