"""Makes the LLM of a command; on a terminal with a line that says what loading is busy with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.frontend.llm import LLM


def open_llm(settings: dict[str, Any]) -> LLM:
    """Slow: imports torch and loads a model. Without a terminal it says nothing."""
    if not sys.stderr.isatty():
        from quire import LLM

        return LLM(**settings)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def on_phase(name: str, progress: float | None = None) -> None:
            if progress is None:
                bar.reset(task, description=name, total=None)
            else:
                bar.update(task, description=name, total=1.0, completed=progress)

        from quire import LLM

        return LLM(**settings, on_phase=on_phase)
