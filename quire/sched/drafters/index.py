"""TokenIndex: finds where the last tokens of a context occurred before. Knows token ids only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_MAX_HEADS = 1 << 18
_BATCH = 4096  # positions that one call indexes at most, so that a long prompt does not stop the engine


class Match(NamedTuple):
    end: int  # index of the token that followed
    length: int  # tokens before it that are equal to the last ones of the context


class TokenIndex:
    """Hash chains over n-grams, as LZ77 compressors have them: 8 bytes a token, and a table of fixed size.

    `tokens` is shared with its owner, who only appends to it. Hashes may collide: a match is compared token by token.
    """

    __slots__ = ("_heads", "_links", "_mask", "_size", "tokens")

    def __init__(self, tokens: Sequence[int], size: int, capacity: int) -> None:
        """`size`: tokens of an n-gram; `capacity`: tokens that are expected."""
        self.tokens = tokens
        self._size = size
        self._mask = (1 << max(10, min(capacity, _MAX_HEADS).bit_length())) - 1
        self._heads = array("i", [0]) * (self._mask + 1)  # hash of an n-gram -> where the newest one ends
        self._links = array("i", [0]) * size  # end of an n-gram -> end of the one before it with the same hash

    @property
    def num_indexed(self) -> int:
        return len(self._links) - 1

    def catch_up(self) -> None:
        """Index the next tokens, at most some thousands of them."""
        tokens, size, heads, links, mask = self.tokens, self._size, self._heads, self._links, self._mask
        first = len(links)
        for end in range(first, min(len(tokens) + 1, first + _BATCH)):
            slot = hash(tuple(tokens[end - size : end])) & mask
            links.append(heads[slot])
            heads[slot] = end

    def find(self, context: Sequence[int], longest: int, most: int) -> list[Match]:
        """Return matches of the end of `context`, the newest first; `most` candidates are compared.

        No match is longer than `longest`. The end of the index's own tokens is none, since nothing follows it.
        """
        tokens, size, links = self.tokens, self._size, self._links
        last = len(context)
        if last < size:
            return []
        gram = tuple(context[last - size : last])
        end = self._heads[hash(gram) & self._mask]
        found = []
        while end and most:
            if end < len(tokens) and tuple(tokens[end - size : end]) == gram:
                most_equal = min(longest, end, last)
                length = size
                while length < most_equal and tokens[end - length - 1] == context[last - length - 1]:
                    length += 1
                found.append(Match(end, length))
            most -= 1
            end = links[end]
        return found
