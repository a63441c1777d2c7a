"""Patterns that name modules, as PEFT's configs have them: regular expressions, matched without backtracking.

They come with files of others, and a step may wait for the thread that matches them. So all places that a pattern
can have come to are followed at once, and only what such patterns need is taken: a quantifier stands behind one
character.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from quire.types.errors import AdapterError

_Match = Callable[[str, set[int]], set[int]]  # (module, places before) -> places behind
_PLAIN = re.compile(r"[\w.\-]*")
_ATOM = re.compile(r"\\[.\-_/dDwWsS]|\[\^?\]?[^\]\\\[]*\]|[^\\\[\](){}|*+?^$]")
_DEEPEST = 32


def is_plain(pattern: str) -> bool:
    """Whether it is a name, which takes no time to match."""
    return _PLAIN.fullmatch(pattern) is not None


@lru_cache(4096)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern matches a module's path, or the end of it behind a dot; AdapterError if it cannot be used."""
    if is_plain(pattern):
        plain = re.compile(rf"(?:.*\.)?{pattern}")
        return lambda module: plain.fullmatch(module) is not None
    reader = _Reader(pattern)
    match = reader.alternatives()
    if reader.at < len(pattern):
        raise reader.error("an unbalanced parenthesis")

    def matches(module: str) -> bool:
        begins = {0, *(at + 1 for at, character in enumerate(module) if character == ".")}
        return len(module) in match(module, begins)

    return matches


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern, self.at, self._depth = pattern, 0, 0

    def error(self, what: str) -> AdapterError:
        return AdapterError(
            f"the pattern {self._pattern[:200]!r} has {what} at character {self.at}; use names, '.', classes, groups"
            " and quantifiers behind one character"
        )

    def alternatives(self) -> _Match:
        found = [self._sequence()]
        while self._takes("|"):
            found.append(self._sequence())
        return lambda module, places: set().union(*(match(module, places) for match in found))

    def _sequence(self) -> _Match:
        found: list[_Match] = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            found.append(self._item())

        def match(module: str, places: set[int]) -> set[int]:
            for each in found:
                if not places:
                    break
                places = each(module, places)
            return places

        return match

    def _item(self) -> _Match:
        if self._takes("^"):
            return lambda module, places: places & {0}
        if self._takes("$"):
            return lambda module, places: places & {len(module)}
        if self._takes("(?:") or self._takes("("):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise self.error(f"more than {_DEEPEST} groups in one another")
            group = self.alternatives()
            if not self._takes(")"):
                raise self.error("an unbalanced parenthesis")
            self._depth -= 1
            if self._takes("?"):
                return lambda module, places: places | group(module, places)
            return group
        return self._characters()

    def _characters(self) -> _Match:
        atom = _ATOM.match(self._pattern, self.at)
        if atom is None:
            raise self.error(f"a {self._pattern[self.at]!r} that cannot be used")
        try:
            one = re.compile(atom[0]).fullmatch
        except re.error as error:
            raise self.error(f"a wrong class ({error})") from None
        self.at = atom.end()
        quantifier = next((sign for sign in "*+?" if self._takes(sign)), "")

        def match(module: str, places: set[int]) -> set[int]:
            found = set() if quantifier in ("", "+") else set(places)
            for place in places:
                while place < len(module) and one(module[place]) and place + 1 not in found:
                    place += 1
                    found.add(place)
                    if quantifier in ("", "?"):
                        break
            return found

        return match

    def _takes(self, sign: str) -> bool:
        found = self._pattern.startswith(sign, self.at)
        self.at += len(sign) if found else 0
        return found
