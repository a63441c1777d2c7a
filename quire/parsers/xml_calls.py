"""Calls written in tags: a name, then for each argument its key and its value as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.parsers.argument_grammar import (
    ANY_KEY,
    free_arguments,
    in_order,
    plain_value,
    properties,
    strings_and_others,
    text_until,
)
from quire.parsers.codec import CallSink, Codec, Reader, Status
from quire.parsers.format import Tool
from quire.parsers.json_scan import JsonScanner, escaped, to_json
from quire.parsers.lark import Lark, choice, many
from quire.parsers.scan import MAX_NAME, NAME, Match, match, scanner_for, skip_space
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
    text_key_end: str = ""  # what ends the key of a string, if `key_end` is for values of other types alone

    def begins(self, char: str) -> bool:
        return NAME.match(char) is not None

    def reader(self, sink: CallSink, tools: Mapping[str, Tool]) -> Reader:
        return _TagReader(self, sink, tools)

    def render(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        parts = [name, self.name_end]
        for key, value in arguments.items():
            key_end = self.text_key_end if self.text_key_end and isinstance(value, str) else self.key_end
            parts += [self.key_begin, key, key_end, self.render_value(value), self.value_end]
        return "".join((*parts, self.end))

    def render_value(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        scalar = value is None or isinstance(value, bool)
        return str(value) if self.python_words and scalar else to_json(value)

    def grammar(self, tool: Tool, lark: Lark) -> str:
        if free_arguments(tool):
            begin, middle = lark.literal(self.key_begin), lark.literal(self.text_key_end or self.key_end)
            arguments = many(f"{begin} {ANY_KEY} {middle} {text_until(lark, self.value_end)}")
        else:
            items = [
                (self._argument(lark, tool, name, schema), required) for name, schema, required in properties(tool)
            ]
            arguments = in_order(lark, items, "")
        return f"{lark.literal(tool.name + self.name_end)} {arguments} {lark.literal(self.end)}"

    def _argument(self, lark: Lark, tool: Tool, name: str, schema: Mapping[str, Any]) -> str:
        if not self.text_key_end:
            value = plain_value(lark, tool, name, schema, self.value_end)
            return f"{lark.literal(self.key_begin + name + self.key_end)} {value}"
        texts, others = strings_and_others(tool, schema)
        forms = [(text, self.text_key_end) for text in texts] + [(other, self.key_end) for other in others]
        written = []
        for part, key_end in forms:
            alone = replace(tool, parameters={**tool.parameters, "properties": {name: part}})
            value = plain_value(lark, alone, name, part, self.value_end)
            written.append(f"{lark.literal(self.key_begin + name + key_end)} {value}")
        return choice(list(dict.fromkeys(written)))


class _TagReader(Reader):
    """Passes strings on as they come, and values of other types when they are complete."""

    def __init__(self, codec: TaggedArguments, sink: CallSink, tools: Mapping[str, Tool]) -> None:
        self._sink = sink
        self._tools = tools
        self._name_end = codec.name_end.strip()
        self._key_begin = codec.key_begin.strip()
        # "</arg_key>\n<arg_value>" is two markers with white space between.
        self._key_ends = [part.strip() for part in codec.key_end.split("\n") if part.strip()]
        self._text_key_end = codec.text_key_end
        self._value_end = codec.value_end.strip()
        self._value_scanner = scanner_for(frozenset({self._value_end}))
        self._breaks = (codec.key_end.endswith("\n"), codec.value_end.startswith("\n"))
        self._end = codec.end.strip()
        self._name = ""
        self._parameters: Mapping[str, Any] = {}
        self._started = False
        self._num_arguments = 0
        self._types: frozenset[str] | None = None  # of the argument whose value is being read
        self._at_value_begin = False
        self._seen = 0  # how much of a value in the buffer has been looked at
        self._json: JsonScanner | None = None

    def read(self, text: str, position: int, final: bool) -> int:
        before = -1
        while self.status is Status.MORE and position != before:
            if position == len(text) and not final:
                return position
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
        # The end marker is missing: the caller parses what follows.
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
        end, of_text = text.find(self._key_ends[0], begin), -1
        if self._text_key_end:
            of_text = text.find(self._text_key_end, begin)
        is_string = of_text >= 0 and (end < 0 or of_text < end)
        end = of_text if is_string else end
        if (len(text) if end < 0 else end) - begin > _MAX_KEY:
            self.status = Status.BAD
            return position
        if end < 0:
            return position
        key = text[begin:end].strip()
        end += len(self._text_key_end if is_string else self._key_ends[0])
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
        if is_string and (not self._types or "string" in self._types):
            self._types = frozenset({"string"})
        elif self._text_key_end:
            self._types = (self._types - {"string"}) or self._types
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
            self._seen = 0
            self._json = None
            if self._breaks[0] and text[position] == "\n":
                position += 1
        types = self._types or frozenset()
        return self._read_text(text, position, final) if is_text(types) else self._read_typed(text, position, final)

    def _read_text(self, text: str, position: int, final: bool) -> int:
        start, end = self._value_scanner.find(text, position, final)
        if end > start:
            self._say(escaped(text[position : self._without_break(text, position, start)]) + '"')
            self._types = None
            return end
        safe = start if final else self._without_break(text, position, start)
        self._say(escaped(text[position:safe]))
        return safe

    def _read_typed(self, text: str, position: int, final: bool) -> int:
        """The value stays in the buffer until it is complete. Inside of its JSON nothing is a marker."""
        types = self._types or frozenset()
        at = position + self._seen
        if self._json is None:
            at = skip_space(text, at)
            if at == len(text) and not final:
                return position
            self._json = JsonScanner()
            if text[at : at + 1] not in ("{", "["):
                self._json.status = Status.BAD
        scanner = self._json
        if scanner.status is Status.MORE:
            at = scanner.scan(text, at)
            scanner.take()
            if not (final or scanner.over):
                self._seen = at - position
                return position
            at = at if scanner.whole else position
        end = text.find(self._value_end, at)
        if end >= 0:
            self._say(convert(text[position : self._without_break(text, position, end)], types))
            self._types = None
            return end + len(self._value_end)
        self._seen = max(at, len(text) - len(self._value_end) + 1) - position
        if not final or position == len(text):
            return position
        value = convert(text[position:], types)
        self._say(value[:-1] if value.startswith('"') else value)
        return len(text)

    def _without_break(self, text: str, position: int, end: int) -> int:
        return end - 1 if self._breaks[1] and end > position and text[end - 1] == "\n" else end

    def _say(self, fragment: str) -> None:
        if fragment:
            self._sink.arguments(fragment)

    def _start(self) -> bool:
        self._started = self._started or self._sink.start(self._name)
        return self._started
