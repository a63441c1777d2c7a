"""Encodes long texts piece by piece, so that no text takes more memory than one piece and its token ids.

A text is cut where a cut changes no token: between a letter and a single character that is none, before another
letter, where the text around has the same tokens with the cut as without. Text that has no such place for four
pieces' length is cut there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE = 1 << 16  # characters
_MAX_PIECE = 1 << 18
_CONTEXT = 64  # characters on each side of a cut that are tokenized to see whether it changes anything
_TRIES = 16
_CUT_AT_SPACE = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_CUT = re.compile(r"(?<=[^\W\d_])[^\w\r](?=[^\W\d_])")

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens at the ends."""


class LongText:
    """How one tokenizer's texts may be cut. Read-only after construction."""

    def __init__(self, encode: Encode, piece: int = PIECE, max_piece: int = _MAX_PIECE) -> None:
        self._encode = encode
        self._piece = piece
        self._max_piece = max_piece
        # A vocabulary that puts a space before every text would put a second one before a piece that begins with one.
        self._drops_space = encode("some words") == encode("some") + encode("words")

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The pieces, and of each whether the cut at its end is known to change nothing."""
        begin = 0
        while begin < len(text):
            end, exact = self._next_cut(text, begin)
            yield text[begin:end], exact
            begin = end + (self._drops_space and exact and end < len(text))

    def tail(self, text: str, begin: int) -> str:
        """The text from `begin` on, and from a little before it where a cut there changes nothing."""
        cut = self._cut_between(text, max(0, begin - self._piece), begin)
        return text[begin if cut is None else cut + self._drops_space :]

    def _next_cut(self, text: str, begin: int) -> tuple[int, bool]:
        if len(text) - begin <= self._piece:
            return len(text), True
        last = begin + self._max_piece
        cut = self._cut_between(text, begin + self._piece, last)
        if cut is not None:
            return cut, True
        return (len(text), True) if len(text) <= last else (last, False)

    def _cut_between(self, text: str, first: int, last: int) -> int | None:
        candidates = (_CUT_AT_SPACE if self._drops_space else _CUT).finditer(text, first, last)
        for _, candidate in zip(range(_TRIES), candidates, strict=False):
            if self._separates(text, candidate.start()):
                return candidate.start()
        return None

    def _separates(self, text: str, cut: int) -> bool:
        left, right = text[max(0, cut - _CONTEXT) : cut], text[cut : cut + _CONTEXT]
        apart = self._encode(left) + self._encode(right[1:] if self._drops_space else right)
        return self._encode(left + right) == apart
