from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from quire.frontend.progress import NullProgress, TerminalProgress, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_counts_and_the_rate() -> None:
    screen = io.StringIO()
    with TerminalProgress(3, Console(file=screen, force_terminal=True, width=120)) as progress:
        progress.advance(1, 100)
        progress.advance(2, 50)
    assert "Processed prompts" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    assert "output tok/s" in screen.getvalue()


def test_a_bar_is_shown_only_to_a_terminal_and_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert type(make_progress(3, True)) is TerminalProgress
    assert type(make_progress(3, False)) is NullProgress
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with make_progress(3, True) as progress:
        progress.advance(3, 100)
    assert type(progress) is NullProgress
