"""Calls written in tags: a name, then for each argument its key and its value as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.parsers.codec import CallSink, Codec, Reader, Status
from quire.parsers.format import Tool
from quire.parsers.json_scan import escaped, to_json
from quire.parsers.scan import MAX_NAME, NAME, Match, match, skip_space
from quire.parsers.values import argument_types, convert, is_text

_MAX_KEY = 256


@dataclass(frozen=True)
class TaggedArguments(Codec):
    """`name` `name_end`, then `key_begin` key `key_end` value `value_end` for each argument, then `end`.

    A line break at the end of `key_end` or at the beginning of `value_end` does not belong to the value.
    """

    name_end: str
    key_begin: str
    key_end: str
    value_end: str
    end: str
    python_words: bool = False  # true, false and null are written True, False and None

    def begins(self, char: str) -> bool:
        return NAME.match(char) is not None

    def reader(self, sink: CallSink, tools: Mapping[str, Tool]) -> Reader:
        return _TagReader(self, sink, tools)

    def render(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        parts = [name, self.name_end]
        for key, value in arguments.items():
            parts += [self.key_begin, key, self.key_end, self.render_value(value), self.value_end]
        return "".join((*parts, self.end))

    def render_value(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        scalar = value is None or isinstance(value, bool)
        return str(value) if self.python_words and scalar else to_json(value)


class _TagReader(Reader):
    """Passes strings on as they come, and values of other types when they are complete."""

    def __init__(self, codec: TaggedArguments, sink: CallSink, tools: Mapping[str, Tool]) -> None:
        self._sink = sink
        self._tools = tools
        self._name_end = codec.name_end.strip()
        self._key_begin = codec.key_begin.strip()
        # "</arg_key>\n<arg_value>" is two markers with white space between.
        self._key_ends = [part.strip() for part in codec.key_end.split("\n") if part.strip()]
        self._value_end = codec.value_end.strip()
        self._breaks = (codec.key_end.endswith("\n"), codec.value_end.startswith("\n"))
        self._end = codec.end.strip()
        self._name = ""
        self._parameters: Mapping[str, Any] = {}
        self._started = False
        self._num_arguments = 0
        self._types: frozenset[str] | None = None  # of the argument whose value is being read
        self._at_value_begin = False
        self._value: list[str] = []

    def read(self, text: str, position: int, final: bool) -> int:
        before = -1
        while self.status is Status.MORE and position != before:
            before = position
            if not self._name:
                position = self._read_name(text, position, final)
            elif self._types is None:
                position = self._read_key(text, position, final)
            else:
                position = self._read_value(text, position, final)
                before = -1 if self._types is None else before
        return position

    def _read_name(self, text: str, position: int, final: bool) -> int:
        begin = skip_space(text, position)
        if begin == len(text):
            return position
        found = NAME.match(text, begin)
        if found is None or len(found[0]) == MAX_NAME:
            self.status = Status.BAD
            return position
        if found.end() == len(text) and not final:
            return position
        end = skip_space(text, found.end())
        after = match(text, end, self._name_end) if self._name_end else Match.FULL
        if after is Match.PARTIAL and not final:
            return position
        if after is not Match.FULL or (not self._name_end and end == found.end() and not text.startswith("<", end)):
            self.status = Status.BAD
            return position
        self._name = found[0]
        tool = self._tools.get(self._name)
        self._parameters = tool.parameters if tool is not None else {}
        return end + len(self._name_end)

    def _read_key(self, text: str, position: int, final: bool) -> int:
        """At the beginning of an argument or at the end of the call."""
        begin = skip_space(text, position)
        key, end = match(text, begin, self._key_begin), match(text, begin, self._end)
        if end is Match.FULL:
            return self._finish(begin + len(self._end))
        if key is Match.FULL:
            return self._read_key_text(text, position, begin + len(self._key_begin))
        if Match.PARTIAL in (key, end) and not final:
            return position
        if not self._started:
            self.status = Status.BAD
            return position
        # The end was forgotten. What follows is for others to understand.
        return self._finish(position)

    def _finish(self, position: int) -> int:
        if not self._start():
            self.status = Status.BAD
            return position
        self._sink.arguments("}" if self._num_arguments else "{}")
        self.complete = True
        self.status = Status.DONE
        return position

    def _read_key_text(self, text: str, position: int, begin: int) -> int:
        end = text.find(self._key_ends[0], begin)
        if (len(text) if end < 0 else end) - begin > _MAX_KEY:
            self.status = Status.BAD
            return position
        if end < 0:
            return position
        key = text[begin:end].strip()
        end += len(self._key_ends[0])
        for part in self._key_ends[1:]:
            at = skip_space(text, end)
            found = match(text, at, part)
            if found is Match.PARTIAL:
                return position
            if found is Match.NONE:
                self.status = Status.BAD
                return position
            end = at + len(part)
        if not self._start():
            self.status = Status.BAD
            return position
        self._types = argument_types(self._parameters, key)
        self._at_value_begin = True
        self._sink.arguments(("{" if self._num_arguments == 0 else ", ") + f"{to_json(key)}: ")
        if is_text(self._types):
            self._sink.arguments('"')
        self._num_arguments += 1
        return end

    def _read_value(self, text: str, position: int, final: bool) -> int:
        if self._at_value_begin:
            if position == len(text):
                return position
            self._at_value_begin = False
            if self._breaks[0] and text[position] == "\n":
                position += 1
        end = text.find(self._value_end, position)
        if end >= 0:
            self._take(text[position : self._without_break(text, position, end)], True)
            return end + len(self._value_end)
        safe = len(text) if final else self._safe_end(text, position)
        self._take(text[position:safe], False)
        if final:
            self._cut_short()
        return safe

    def _safe_end(self, text: str, position: int) -> int:
        """Up to where the text is surely part of the value."""
        safe = len(text)
        for begin in range(max(position, len(text) - len(self._value_end) + 1), len(text)):
            if self._value_end.startswith(text[begin:]):
                safe = begin
                break
        return self._without_break(text, position, safe)

    def _without_break(self, text: str, position: int, end: int) -> int:
        return end - 1 if self._breaks[1] and end > position and text[end - 1] == "\n" else end

    def _take(self, piece: str, ended: bool) -> None:
        types = self._types or frozenset()
        if is_text(types):
            fragment = escaped(piece) + ('"' if ended else "")
            if fragment:
                self._sink.arguments(fragment)
        else:
            self._value.append(piece)
            if ended:
                self._sink.arguments(convert("".join(self._value), types))
                self._value.clear()
        if ended:
            self._types = None

    def _cut_short(self) -> None:
        """The output ended inside a value that has not been passed on yet."""
        value = "".join(self._value)
        if value:
            converted = convert(value, self._types or frozenset())
            self._sink.arguments(converted[:-1] if converted.startswith('"') else converted)

    def _start(self) -> bool:
        self._started = self._started or self._sink.start(self._name)
        return self._started
