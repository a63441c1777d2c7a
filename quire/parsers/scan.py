"""Finds markers in text that arrives in pieces, in one pass and without looking at any character twice for long."""

from __future__ import annotations

import enum
import functools
import re

MAX_NAME = 128
# Letters with which a name of a tool cannot be confused with the syntax around it.
NAME = re.compile(r"""[^\s<>{}\[\]()"'`=,;|\\/\ud800-\udfff]""" + f"{{1,{MAX_NAME}}}")


class Match(enum.Enum):
    NONE = "none"
    PARTIAL = "partial"  # the text ends inside what may become the marker
    FULL = "full"


def match(text: str, position: int, marker: str) -> Match:
    """Whether the marker stands at this position."""
    if text.startswith(marker, position):
        return Match.FULL
    if len(text) - position < len(marker) and marker.startswith(text[position:]):
        return Match.PARTIAL
    return Match.NONE


def skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


class MarkerScanner:
    """Looks for the first of several markers; where one begins another, the longest wins."""

    def __init__(self, markers: frozenset[str]) -> None:
        self._markers = markers
        self._lengths = sorted({len(marker) for marker in self._markers}, reverse=True)
        self._prefixes = frozenset(marker[:end] for marker in self._markers for end in range(1, len(marker)))
        firsts = "".join(re.escape(first) for first in sorted({marker[0] for marker in self._markers}))
        # (?!) matches nowhere.
        self.candidate = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._longest = self._lengths[0] if self._lengths else 0

    def find(self, text: str, position: int, final: bool) -> tuple[int, int]:
        """Where the first marker begins and ends.

        If there is none, both numbers say how much of the text is surely no part of a marker.
        """
        while (candidate := self.candidate.search(text, position)) is not None:
            start = candidate.start()
            if not final and len(text) - start < self._longest and text[start:] in self._prefixes:
                return start, start
            for length in self._lengths:
                piece = text[start : start + length]
                if piece in self._markers:
                    return start, start + len(piece)
            position = start + 1
        return len(text), len(text)


@functools.lru_cache(maxsize=256)
def scanner_for(markers: frozenset[str]) -> MarkerScanner:
    """Scanners keep nothing of what they scan, and a tokenizer may have a thousand special tokens: made once."""
    return MarkerScanner(markers)
