"""Cuts a stream of text at the first stop string; knows text deltas, no tokens.

The first match is the one that starts earliest in the whole text; of those that start at the same place the
shortest wins, because it is complete first. The result does not depend on how the text was split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quire.types.errors import RequestError


class StopStringMatcher:
    """Holds back the shortest tail that could still become part of a stop string, and nothing more."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        if "" in stops:
            raise RequestError("a stop string is empty; remove it from the list", field="stop")
        self._stops = sorted(set(stops), key=len)
        self._include_in_output = include_in_output
        self._longest_prefix = max((len(stop) for stop in stops), default=1) - 1
        self._in_order = sorted(self._stops)
        self._prefix_chars = frozenset(char for stop in stops for char in stop[:-1])
        self._held = ""
        self.matched: str | None = None

    def add(self, delta: str) -> tuple[str, str | None]:
        """Take new text; return the text to show and the stop string that ended it, if one did.

        After a match every later call returns no text and the same match.
        """
        if self.matched is not None or not delta:
            return "", self.matched
        text = self._held + delta if self._held else delta
        start, stop = self._first_match(text)
        safe = self._partial_start(text)
        if stop is not None and start <= safe:
            return self._end(text, start, stop), stop
        # A match that starts after an unfinished longer stop string waits until that one is decided.
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> tuple[str, str | None]:
        """The text has ended: return what was held back, cut at a match that was waiting."""
        if self.matched is not None:
            return "", self.matched
        start, stop = self._first_match(self._held)
        if stop is not None:
            return self._end(self._held, start, stop), stop
        text, self._held = self._held, ""
        return text, None

    def _first_match(self, text: str) -> tuple[int, str | None]:
        first, matched = len(text), None
        for stop in self._stops:
            start = text.find(stop, 0, first + len(stop) - 1 if matched else None)
            if start >= 0:
                first, matched = start, stop
        return first, matched

    def _partial_start(self, text: str) -> int:
        """Where the longest suffix begins that is the beginning of a longer stop string."""
        if text[-1] not in self._prefix_chars:
            return len(text)
        for start in range(max(0, len(text) - self._longest_prefix), len(text)):
            suffix = text[start:]
            # Strings that go on from another one come right after it.
            index = bisect_right(self._in_order, suffix)
            if index < len(self._in_order) and self._in_order[index].startswith(suffix):
                return start
        return len(text)

    def _end(self, text: str, start: int, stop: str) -> str:
        self._held = ""
        self.matched = stop
        return text[: start + len(stop)] if self._include_in_output else text[:start]
