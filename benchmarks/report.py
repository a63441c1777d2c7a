"""Where the benchmarks of this folder write their numbers; the rest is quire.bench.report's."""

from __future__ import annotations

import compileall
from pathlib import Path
from typing import Any

import quire
from quire.bench.report import environment, write_report

__all__ = ["compile_as_installed", "environment", "write_results"]

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, environment: dict[str, Any], results: Any) -> Path:
    return write_report(RESULTS / f"{name}.json", environment, results)


def compile_as_installed() -> None:
    """Write the byte code that pip writes; where Python may not write it, each start would compile anew."""
    compileall.compile_dir(Path(quire.__file__).parent, quiet=1)
