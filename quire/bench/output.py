"""Writes what a run leaves behind: the JSON report, the pictures, and the page that shows both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.bench import charts
from quire.bench.page import html_page
from quire.bench.records import RequestRecord
from quire.bench.report import write_report
from quire.bench.stats import Summary
from quire.bench.tables import Grid, summary_grids


def save_run(
    folder: Path,
    name: str,
    environment: dict[str, Any],
    settings: dict[str, Any],
    summary: Summary,
    records: list[RequestRecord],
) -> list[Path]:
    """NAME.json, NAME-timeline.svg, NAME-lengths.svg and NAME.html in `folder`; the JSON comes last."""
    subtitle = describe(summary)
    pictures = {
        "timeline": charts.timeline(records, f"{name}: requests over time", subtitle),
        "lengths": charts.lengths(records, f"{name}: lengths", subtitle),
    }
    paths = save_page(folder, name, summary_grids(summary), pictures, environment)
    results = {"summary": summary.to_dict(), "requests": [plain_record(record) for record in records]}
    return [*paths, write_report(folder / f"{name}.json", environment, results, settings=settings)]


def save_page(
    folder: Path, name: str, grids: Sequence[Grid], pictures: dict[str, str], environment: dict[str, Any]
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, picture in pictures.items():
        paths.append(folder / f"{name}-{kind}.svg")
        paths[-1].write_text(picture, encoding="utf-8")
    page = folder / f"{name}.html"
    page.write_text(html_page(name, grids, list(pictures.values()), environment), encoding="utf-8")
    return [*paths, page]


def describe(summary: Summary) -> str:
    """One line under a picture's title."""
    failed = f", {summary.failed} failed" if summary.failed else ""
    return (
        f"{summary.completed} requests in {summary.duration_s:.3g} s{failed}, "
        f"{summary.output_tokens_per_s:,.1f} output tokens/s"
    )


def plain_record(record: RequestRecord) -> dict[str, Any]:
    """Without the gaps: there is one per token, and the summary has their percentiles."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    plain.pop("gaps", None)
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in plain.items()}
