"""Where answers are printed: as they are into a pipe; on a terminal wrapped at words, or as rendered markdown.

What a model says is not to be trusted: control characters, with which text could move the cursor or talk to the
terminal, do not reach it.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown

Style = Literal["markdown", "wrap", "plain"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)
_REFRESH_SECONDS = 0.05


class Out(Protocol):
    """What an answer is written to."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...


@contextmanager
def screen(style: Style, out: TextIO | None = None) -> Iterator[Out]:
    """Where to write an answer; everything is shown when it ends. Whatever the style, a pipe gets the bare text."""
    out = sys.stdout if out is None else out
    if not out.isatty() or style == "plain":
        yield out
        return
    if style == "wrap":
        yield Wrapped(out)
        return
    from rich.console import Console

    rendered = Rendered(Console(file=out))
    try:
        yield rendered
    finally:
        rendered.close()


def without_controls(text: str) -> str:
    return _CONTROL.sub("", text)


class Wrapped:
    """Breaks lines between words. A word is held back until it has ended."""

    def __init__(self, out: TextIO, width: int | None = None) -> None:
        self._out = out
        self._width = width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        for part in re.findall(r"\n|[^\S\n]+|\S+", without_controls(text)):
            if part.isspace():
                self._end_word()
                self._out.write(part)
                self._column = 0 if part == "\n" else self._column + len(part)
            else:
                for letter in part:
                    self._word += letter
                    if len(self._word) == self._columns():  # no line holds more of it
                        self._end_word()

    def flush(self) -> None:
        self._out.flush()

    def _end_word(self) -> None:
        from rich.cells import cell_len

        size = cell_len(self._word)
        if size and self._column and self._column + size > self._columns():
            self._out.write("\n")
            self._column = 0
        self._out.write(self._word)
        self._column, self._word = self._column + size, ""

    def _columns(self) -> int:
        return self._width or shutil.get_terminal_size().columns


class Rendered:
    """Prints every block of markdown when it is whole, and shows the one that is not as far as it has come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._live: Live | None = None
        self._shown_at = 0.0
        self._is_first = True

    def write(self, text: str) -> None:
        self._text += without_controls(text)

    def flush(self) -> None:
        whole, self._text = split_blocks(self._text)
        if whole.strip():
            self._print(whole)
        if self._text.strip() and time.monotonic() - self._shown_at > _REFRESH_SECONDS:
            self._show()

    def close(self) -> None:
        rest, self._text = self._text, ""
        self._hide()
        if rest.strip():
            self._print(rest)

    def _print(self, markdown: str) -> None:
        self._hide()
        if not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(_markdown(markdown))

    def _show(self) -> None:
        """The end of it, if it is higher than the terminal: what has scrolled away cannot be drawn over."""
        from rich.live import Live
        from rich.segment import Segment, Segments

        lines = self._console.render_lines(_markdown(self._text), pad=False)[-max(1, self._console.height - 2) :]
        if self._live is None:
            if not self._is_first:
                self._console.print()
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Segments([part for line in lines for part in (*line, Segment.line())]), refresh=True)
        self._shown_at = time.monotonic()

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            if not self._is_first:
                self._console.file.write("\x1b[1A")  # over the empty line before it, which _print makes again


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown up to the last blank line that is in no code block, and the rest."""
    end = 0
    for match in re.finditer(r"\n[ \t]*\n", text):
        fences = [fence[1] for fence in _FENCE.finditer(text, 0, match.start())]
        is_open = ""
        for fence in fences:
            if not is_open:
                is_open = fence
            elif fence[0] == is_open[0] and len(fence) >= len(is_open):
                is_open = ""
        if not is_open:
            end = match.end()
    return text[:end], text[end:]


def _markdown(text: str) -> Markdown:
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    rendered = Markdown(text)
    # What looks like HTML, such as the marks of thinking, is text here and not left out.
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    rendered.parsed = parser.parse(text)
    return rendered
