"""What a terminal is shown of an answer: words that are not torn, markdown that is rendered, and no control codes."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quire.cli.screen import Rendered, Wrapped, screen, split_blocks


def wrapped(pieces: list[str], width: int) -> str:
    out = io.StringIO()
    writer = Wrapped(out, width)
    for piece in pieces:
        writer.write(piece)
    writer.write("\n")
    return out.getvalue()


def rendered(pieces: list[str]) -> str:
    out = io.StringIO()
    writer = Rendered(Console(file=out, width=60, height=20))
    for piece in pieces:
        writer.write(piece)
        writer.flush()
    writer.close()
    return out.getvalue()


@given(st.text(st.sampled_from("ab \n"), max_size=60), st.lists(st.integers(1, 9), max_size=30), st.integers(3, 20))
def test_wrapping_loses_nothing_however_the_text_is_cut(text: str, cuts: list[int], width: int) -> None:
    pieces, left = [], text
    for cut in cuts:
        pieces.append(left[:cut])
        left = left[cut:]
    whole = wrapped([text], width)
    assert wrapped([*pieces, left], width) == whole
    assert whole.split() == text.split() or width < max(map(len, text.split()), default=0) + 1


def test_lines_break_between_words() -> None:
    assert wrapped(["one two th", "ree four"], 9) == "one two \nthree \nfour\n"


def test_blocks_end_at_blank_lines_outside_of_code() -> None:
    code = "```python\na = 1\n\nb = 2\n"
    assert split_blocks("One.\n\nTwo") == ("One.\n\n", "Two")
    assert split_blocks(f"One.\n\n{code}") == ("One.\n\n", code)
    assert split_blocks(f"{code}```\n\nEnd") == (f"{code}```\n\n", "End")


def test_markdown_is_rendered_and_marks_of_thinking_stay() -> None:
    text = "<think>\nHm.\n</think>\n\n# Title\n\nSome **bold** words.\n\n- one\n- two\n\n```python\nprint('x')\n```\n"
    shown = rendered([text[i : i + 3] for i in range(0, len(text), 3)])
    for part in ("<think>", "Title", "Some bold words.", "• one", "print('x')"):
        assert part in shown
    assert "**" not in shown
    assert "```" not in shown


@pytest.mark.parametrize("style", ["markdown", "wrap"])
def test_a_model_cannot_talk_to_the_terminal(style: str) -> None:
    evil = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\r\x08e"
    shown = rendered([evil]) if style == "markdown" else wrapped([evil], 80)
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown
    assert not set("\x07\x08\x9b\r") & set(shown)


def test_a_pipe_gets_the_text_as_it_is() -> None:
    out = io.StringIO()
    with screen("markdown", out) as writer:
        writer.write("**as it is**\x1b[2J")
    assert out.getvalue() == "**as it is**\x1b[2J"
