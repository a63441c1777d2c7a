"""Stop strings: the result is that of one cut through the whole text, whatever the chunks."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.stop_strings import StopStringMatcher
from quire.types.errors import RequestError

# A tiny alphabet makes overlaps, nesting and near misses common.
TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def one_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    found = [(text.index(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + length] if include else text[:start], stop


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def run(matcher: StopStringMatcher, chunks: list[str]) -> tuple[str, str | None]:
    shown = ""
    for chunk in chunks:
        text, matched = matcher.add(chunk)
        shown += text
        if matched is not None:
            return shown, matched
    text, matched = matcher.flush()
    return shown + text, matched


@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=30), st.booleans())
def test_any_split_gives_the_one_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    assert run(StopStringMatcher(stops, include), chunks_of(text, cuts)) == one_cut(text, stops, include)


@given(TEXTS, STOPS, st.booleans())
def test_no_part_of_a_stop_string_is_ever_shown_early(text: str, stops: list[str], include: bool) -> None:
    """At every moment what was shown is a beginning of the final result, and no more is held than could matter."""
    final, _ = one_cut(text, stops, include)
    matcher = StopStringMatcher(stops, include)
    shown = ""
    for index, char in enumerate(text):
        part, matched = matcher.add(char)
        shown += part
        assert final.startswith(shown)
        if matched:
            break
        held = text[len(shown) : index + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_that_contains_another_waits_for_it() -> None:
    matcher = StopStringMatcher(["abc", "b"], include_in_output=True)
    assert matcher.add("xab") == ("x", None)
    assert matcher.add("c!") == ("abc", "abc")
    matcher = StopStringMatcher(["abc", "b"])
    assert matcher.add("xab") == ("x", None)
    assert matcher.add("d") == ("a", "b")
    matcher = StopStringMatcher(["abc", "b"])
    matcher.add("xab")
    assert matcher.flush() == ("a", "b")


def test_nothing_follows_a_match() -> None:
    matcher = StopStringMatcher(["."])
    assert matcher.add("a.b") == ("a", ".")
    assert matcher.add("c") == ("", ".")
    assert matcher.flush() == ("", ".")


def test_without_stop_strings_text_passes_through() -> None:
    assert run(StopStringMatcher([]), ["a", "", "b"]) == ("ab", None)


def test_a_long_stop_string_takes_memory_in_proportion() -> None:
    stop = "ab" * 20_000
    tracemalloc.start()
    try:
        matcher = StopStringMatcher([stop])
        assert matcher.add("x" + stop[:-1]) == ("x", None)
        assert matcher.add("b") == ("", stop)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(stop)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopStringMatcher(["a", ""])
    assert caught.value.field == "stop"
