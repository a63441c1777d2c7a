"""Where the benchmarks of this folder write their numbers; the rest is quire.bench.report's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.bench.report import environment, write_report

__all__ = ["environment", "write_results"]

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, environment: dict[str, Any], results: Any) -> Path:
    return write_report(RESULTS / f"{name}.json", environment, results)
