"""A progress bar for batches of requests, and the one that shows nothing."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class NullProgress(AbstractContextManager["NullProgress"]):
    """Shows nothing."""

    def advance(self, num_requests: int, num_tokens: int) -> None:
        """This many requests finished and this many tokens were generated since the last call."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class TerminalProgress(NullProgress):
    """Finished requests, time left, and the rate of generated tokens."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        """`console` is where to draw; stderr by default."""
        # Imported when a bar is drawn: programs without a terminal need not wait for it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]:.1f} output tok/s"),
            console=console or Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, rate=0.0)
        self._begin = time.monotonic()
        self._num_tokens = 0

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def advance(self, num_requests: int, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        rate = self._num_tokens / max(time.monotonic() - self._begin, 1e-9)
        self._bar.update(self._task, advance=num_requests, rate=rate)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()


def make_progress(total: int, wanted: bool) -> NullProgress:
    """A bar where it is wanted and somebody can see it."""
    return TerminalProgress(total) if wanted and sys.stderr.isatty() else NullProgress()
