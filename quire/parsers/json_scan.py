"""Follows one JSON value through text that arrives in pieces, and says at once where it ends or goes wrong.

Control characters inside strings, which models write for line breaks, are let through as escapes, and half of a
surrogate pair as U+FFFD, since no answer can hold it. Nothing else is repaired.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from quire.parsers.codec import Status

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NEEDS_ESCAPE = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = "[0-9a-fA-F]"
_LOW_HALF = rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
# A character outside the BMP is two escapes, halves of a surrogate pair; a half alone is no character.
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|u[dD][89abAB]{_HEX}{{2}}{_LOW_HALF})')
_HALF = re.compile(rf"\\u[dD][89a-fA-F]{_HEX}{{2}}")
_ESCAPE_PREFIX = re.compile(
    rf"\\(?:u(?:{_HEX}{{0,4}}|[dD][89abAB]{_HEX}{{2}}\\(?:u(?:[dD](?:[c-fC-F]{_HEX}{{0,2}})?)?)?))?"
)
_ESCAPE_OR_HALF = re.compile(rf"{_ESCAPE.pattern}|{_HALF.pattern}")
_REPLACEMENT = "\\ufffd"
_MAX_DIGITS = 1_000
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_PREFIX = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?")
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_WORDS = ("true", "false", "null")
_SPACE = frozenset(" \t\n\r")
_CLOSERS = {"{": "}", "[": "]"}

# What may come next.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END, _IN_STRING, _IN_WORD, _IN_NUMBER = range(9)


def to_json(value: Any) -> str:
    """JSON text as templates write it. Half of a surrogate pair becomes U+FFFD; ValueError for infinite numbers."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if _SURROGATE.search(text) is not None:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def parse_object(text: str) -> dict[str, Any]:
    """The object that a model or a client wrote as JSON. ValueError says why a text is none.

    Half of a surrogate pair becomes U+FFFD, and a number that no float64 or integer of 1,000 digits holds stays text.
    """
    try:
        value = json.loads(
            _ESCAPE_OR_HALF.sub(lambda found: _REPLACEMENT if _HALF.fullmatch(found[0]) else found[0], text),
            parse_int=lambda digits: int(digits) if len(digits) <= _MAX_DIGITS else digits,
            parse_float=lambda digits: number if math.isfinite(number := float(digits)) else digits,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return to_json(text)[1:-1] if _NEEDS_ESCAPE.search(text) is not None else text


class JsonScanner:
    """One value. `take` returns what has been read since the last call, as JSON text."""

    def __init__(self) -> None:
        self.status = Status.MORE
        self.kind = ""  # the value's first character, when it is known
        self._expect = _VALUE
        self._open: list[str] = []
        self._is_key = False
        self._token = ""  # of a word or a number, as far as it has come
        self._waits = False  # for the rest of an escape
        self._read: list[str] = []

    @property
    def whole(self) -> bool:
        return self.status is Status.DONE

    @property
    def in_string(self) -> bool:
        return self._expect == _IN_STRING and not self.over

    @property
    def over(self) -> bool:
        return self.status is not Status.MORE

    def take(self) -> str:
        text = "".join(self._read)
        self._read.clear()
        return text

    def scan(self, text: str, position: int, final: bool = False) -> int:
        """Read on, up to the end of the value or to the first character that is wrong.

        The text from the returned position on must be given again, with more behind it.
        """
        size = len(text)
        self._waits = False
        while position < size and self.status is Status.MORE and not self._waits:
            expect = self._expect
            if expect == _IN_STRING:
                position = self._string(text, position, final)
            elif expect >= _IN_WORD:
                position = self._scalar(text, position)
            else:
                position = self._structure(text, position)
        if final and self.status is Status.MORE and self._expect == _IN_NUMBER and not self._open:
            self._end_number()
        return position

    def _string(self, text: str, position: int, final: bool) -> int:
        run = _STRING_RUN.match(text, position)
        end = run.end() if run is not None else position
        if end == len(text):
            self._read.append(text[position:end])
            return end
        char = text[end]
        if char == '"':
            self._read.append(text[position : end + 1])
            if self._is_key:
                self._is_key, self._expect = False, _COLON
            else:
                self._end_value()
        elif char == "\\":
            self._read.append(text[position:end])
            return self._escape(text, end, final)
        else:
            self._read.append(text[position:end] + escaped(char))
        return end + 1

    def _escape(self, text: str, position: int, final: bool) -> int:
        whole = _ESCAPE.match(text, position)
        if whole is not None:
            self._read.append(whole[0])
            return whole.end()
        is_prefix = _ESCAPE_PREFIX.fullmatch(text, position) is not None
        if is_prefix and not final:
            self._waits = True
            return position
        half = _HALF.match(text, position)
        if half is not None:
            self._read.append(_REPLACEMENT)
            return half.end()
        if not is_prefix:
            self.status = Status.BAD
            return position
        self._read.append(text[position:])
        return len(text)

    def _scalar(self, text: str, position: int) -> int:
        char = text[position]
        if self._expect == _IN_WORD:
            token = self._token + char
            if not any(word.startswith(token) for word in _WORDS):
                self.status = Status.BAD
                return position
            self._token = token
            self._read.append(char)
            if token in _WORDS:
                self._end_value()
            return position + 1
        if char in _NUMBER_CHARACTERS:
            token = self._token + char
            if _NUMBER_PREFIX.fullmatch(token) is None:
                self.status = Status.BAD
                return position
            self._token = token
            self._read.append(char)
            return position + 1
        self._end_number()
        return position

    def _structure(self, text: str, position: int) -> int:
        char = text[position]
        if char in _SPACE:
            if self.kind:
                self._read.append(char)
            return position + 1
        expect = self._expect
        if expect == _COLON and char == ":":
            self._expect = _VALUE
        elif expect in (_KEY, _KEY_OR_END) and char == '"':
            self._is_key, self._expect = True, _IN_STRING
        elif expect == _COMMA_OR_END and char == ",":
            self._expect = _KEY if self._open[-1] == "{" else _VALUE
        elif expect in (_COMMA_OR_END, _KEY_OR_END, _VALUE_OR_END) and char == _CLOSERS[self._open[-1]]:
            self._open.pop()
            self._end_value()
        elif expect in (_VALUE, _VALUE_OR_END) and self._begin_value(char):
            self.kind = self.kind or char
        else:
            self.status = Status.BAD
            return position
        self._read.append(char)
        return position + 1

    def _begin_value(self, char: str) -> bool:
        if char in _CLOSERS:
            self._open.append(char)
            self._expect = _KEY_OR_END if char == "{" else _VALUE_OR_END
        elif char == '"':
            self._expect = _IN_STRING
        elif char in "tfn":
            self._expect, self._token = _IN_WORD, char
        elif char == "-" or char in "0123456789":
            self._expect, self._token = _IN_NUMBER, char
        else:
            return False
        return True

    def _end_number(self) -> None:
        if _NUMBER.fullmatch(self._token) is None:
            self.status = Status.BAD
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._token = ""
        self._expect = _COMMA_OR_END
        if not self._open:
            self.status = Status.DONE
