"""Markers are found wherever they stand, and only what may become one is held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.parsers.scan import MarkerScanner, Match, match, scanner_for, skip_space

MARKERS = frozenset({"<a>", "<ab>", "[x", "<a>b"})


def test_the_first_marker_is_found_and_the_longest_at_its_place() -> None:
    scanner = MarkerScanner(MARKERS)
    assert scanner.find("12<ab>", 0, False) == (2, 6)
    assert scanner.find("<a>c", 0, False) == (0, 3)
    assert scanner.find("<a>b", 0, False) == (0, 4)
    assert scanner.find("<a>", 0, False) == (0, 0)  # it may become <a>b
    assert scanner.find("<a>", 0, True) == (0, 3)
    assert scanner.find("x<", 0, False) == (1, 1)
    assert scanner.find("x<", 0, True) == (2, 2)
    assert scanner.find("<b><", 0, False) == (3, 3)
    assert scanner.find("<a> [x", 1, False) == (4, 6)


def test_no_markers_are_found_where_there_are_none() -> None:
    assert MarkerScanner(frozenset()).find("abc<", 0, False) == (4, 4)


@given(st.text(alphabet="<>[abx", max_size=12))
def test_nothing_is_overlooked(text: str) -> None:
    scanner = scanner_for(MARKERS)
    start, end = scanner.find(text, 0, True)
    first = min((text.find(marker) for marker in MARKERS if marker in text), default=len(text))
    assert start == first
    assert end == start + max((len(m) for m in MARKERS if text.startswith(m, first)), default=0)


def test_a_marker_at_a_place_is_there_or_beginning_or_not() -> None:
    assert match("ab<c>", 2, "<c>") is Match.FULL
    assert match("ab<", 2, "<c>") is Match.PARTIAL
    assert match("ab", 2, "<c>") is Match.PARTIAL
    assert match("ab<d", 2, "<c>") is Match.NONE


def test_white_space_is_skipped() -> None:
    assert skip_space("a \n\tb", 1) == 4
    assert skip_space("  ", 0) == 2
