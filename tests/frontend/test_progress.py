from __future__ import annotations

import io

from rich.console import Console

from quire.frontend.progress import NullProgress, make_progress


def test_a_terminal_sees_counts_and_the_rate() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with make_progress(3, True, console) as progress:
        progress.advance(1, 100)
        progress.advance(2, 50)
    assert "Processed prompts" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    assert "output tok/s" in screen.getvalue()


def test_nobody_else_sees_anything() -> None:
    screen = io.StringIO()
    with make_progress(3, True, Console(file=screen)) as progress:
        progress.advance(3, 100)
    assert screen.getvalue() == ""
    assert type(make_progress(3, False, Console(file=screen, force_terminal=True))) is NullProgress
