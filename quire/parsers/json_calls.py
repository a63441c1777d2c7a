"""Calls written in JSON: an object with name and arguments, or a name followed by the arguments' object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.parsers.argument_grammar import object_schema
from quire.parsers.codec import CallSink, Codec, Reader, Status
from quire.parsers.format import Tool
from quire.parsers.json_scan import JsonScanner, to_json
from quire.parsers.lark import Lark
from quire.parsers.scan import NAME, Match, match, skip_space

_ARGUMENT_KEYS = ("arguments", "parameters")
_ENVELOPE_KEYS = frozenset({"name", "id", "type", *_ARGUMENT_KEYS})
_MAX_HEADER = 512  # characters; a name with its id and prefix is far shorter


@dataclass(frozen=True)
class JsonEnvelope(Codec):
    """`{"name": "f", "arguments": {...}}`."""

    arguments_key: str = "arguments"  # the one to write; "arguments" and "parameters" are both understood
    known_keys_only: bool = False  # an object with any other key is no call

    def begins(self, char: str) -> bool:
        return char == "{"

    def reader(self, sink: CallSink, tools: Mapping[str, Tool]) -> Reader:
        return EnvelopeReader(sink, self.known_keys_only)

    def render(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        return f'{{"name": {to_json(name)}, "{self.arguments_key}": {to_json(arguments)}}}'

    def grammar(self, tool: Tool, lark: Lark) -> str:
        head = lark.literal(f'{{"name": {to_json(tool.name)}, "{self.arguments_key}": ')
        return f"{head} {lark.schema(object_schema(tool))} {lark.literal('}')}"


class EnvelopeReader(Reader):
    """Passes the arguments on as they come; keeps them only while the name has not come yet."""

    def __init__(self, sink: CallSink, known_keys_only: bool) -> None:
        self._sink = sink
        self._known_keys_only = known_keys_only
        self._expect: Literal["{", "key or }", "key", ":", "value", ", or }"] = "{"
        self._scanner = JsonScanner()
        self._key = ""
        self._name: str | None = None
        self._id: str | None = None
        self._started = False
        self._kept: list[str] = []  # the value that is being read, where it cannot be passed on yet
        self._arguments: str | None = None  # complete, but the name has not come
        self.has_arguments = False  # the object has a key for them

    def read(self, text: str, position: int, final: bool) -> int:
        while self.status is Status.MORE and position < len(text):
            begin, had_arguments = position, self.complete
            if self._expect in ("key", "value"):
                position = self._scanner.scan(text, position, final)
                ok = self._take_value() and self._scanner.status is not Status.BAD
                if ok and self._scanner.status is Status.DONE:
                    ok = self._end_value()
                if not ok:
                    self.status = Status.BAD
                elif position == begin and self._scanner.status is Status.MORE:
                    return position
            else:
                position = self._punctuation(text, position)
            if had_arguments:
                self.unsaid += text[begin:position]
        return position

    def _punctuation(self, text: str, position: int) -> int:
        char = text[position]
        if char.isspace():
            return position + 1
        expect = self._expect
        if expect == "{" and char == "{":
            self._expect = "key or }"
        elif expect == "key or }" and char == '"':
            self._expect, self._scanner = "key", JsonScanner()
            return position
        elif expect == ":" and char == ":":
            self._expect, self._scanner = "value", JsonScanner()
        elif expect == ", or }" and char == ",":
            self._expect = "key or }"
        elif expect in (", or }", "key or }") and char == "}" and self._end():
            self.status = Status.DONE
        else:
            self.status = Status.BAD
            return position
        return position + 1

    def _take_value(self) -> bool:
        """Pass on or keep what was just read. False if there is no such tool."""
        text = self._scanner.take()
        is_arguments = self._expect == "value" and self._key in _ARGUMENT_KEYS and not self.complete
        if is_arguments and self._scanner.kind == "{" and self._name is not None:
            if not self._started and not self._start():
                return False
            if text:
                self._sink.arguments(text)
        else:
            self._kept.append(text)
        return True

    def _end_value(self) -> bool:
        """A key or a value is complete. False if it makes no sense."""
        text = "".join(self._kept)
        self._kept.clear()
        if self._expect == "key":
            self._key = json.loads(text)
            self._expect = ":"
            return not self._known_keys_only or self._key in _ENVELOPE_KEYS
        self._expect = ", or }"
        if self.complete:
            return True
        if self._key in _ARGUMENT_KEYS:
            self.has_arguments = True
            if self._started:
                self.complete = True
                return True
            return self._keep_arguments(text.strip())
        if self._key == "id" and self._scanner.kind == '"':
            self._id = json.loads(text)
        if self._key != "name":
            return True
        if self._scanner.kind != '"':
            return False
        self._name = json.loads(text)
        return NAME.fullmatch(self._name or "") is not None and (self._arguments is None or self._say_all())

    def _keep_arguments(self, text: str) -> bool:
        """Arguments that could not be passed on while they came: they came before the name, or as a string."""
        if self._scanner.kind == '"':
            text = json.loads(text).strip() or "{}"
        elif text == "null":
            text = "{}"
        inner = JsonScanner()
        if inner.scan(text, 0) != len(text) or inner.status is not Status.DONE or inner.kind != "{":
            return False
        self._arguments = inner.take()
        return self._name is None or self._say_all()

    def _say_all(self) -> bool:
        if not self._start():
            return False
        self._sink.arguments(self._arguments or "{}")
        self.complete = True
        return True

    def _end(self) -> bool:
        return self._name is not None and (self.complete or self._say_all())

    def _start(self) -> bool:
        self._started = self._name is not None and self._sink.start(self._name, self._id)
        return self._started


@dataclass(frozen=True)
class NamedJson(Codec):
    """A name, perhaps with an id, then the arguments' object: `name` `name_end` `{...}` `json_end`."""

    name_end: str
    prefix: str = ""  # stands before the name
    json_end: str = ""
    id_mark: str = ""  # between name and id
    name_is_id: bool = False  # the name is written as an id, "functions.name:0"

    def begins(self, char: str) -> bool:
        return NAME.match(char) is not None

    def reader(self, sink: CallSink, tools: Mapping[str, Tool]) -> Reader:
        return _NamedReader(self, sink)

    def render(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        written = f"functions.{name}:{index}" if self.name_is_id else name
        written += f"{self.id_mark}{index:09d}" if self.id_mark else ""
        return f"{self.prefix}{written}{self.name_end}{to_json(arguments)}{self.json_end}"

    def grammar(self, tool: Tool, lark: Lark) -> str:
        name = lark.literal(
            f"{self.prefix}functions.{tool.name}:" if self.name_is_id else f"{self.prefix}{tool.name}"
        )
        number = "/[0-9]{1,3}/" if self.name_is_id else ""
        call_id = f"({lark.literal(self.id_mark)} /[A-Za-z0-9]{{9}}/)?" if self.id_mark else ""
        end = lark.literal(self.json_end) if self.json_end else ""
        return f"{name} {number} {call_id} {lark.literal(self.name_end)} {lark.schema(object_schema(tool))} {end}"

    def parse_header(self, header: str) -> tuple[str, str | None] | None:
        """Name and id, or None if this is no header."""
        header = header.strip().removeprefix(self.prefix.strip()).strip()
        call_id: str | None = None
        if self.id_mark and self.id_mark in header:
            header, _, call_id = header.partition(self.id_mark)
        elif self.name_is_id:
            call_id = header
            head, _, tail = header.rpartition(":")
            header = (head if head and tail.isdigit() else header).removeprefix("functions.")
        return (header, call_id) if NAME.fullmatch(header) is not None else None


class _NamedReader(Reader):
    def __init__(self, codec: NamedJson, sink: CallSink) -> None:
        self._codec = codec
        self._sink = sink
        self._header_end = codec.name_end.strip()
        self._json_end = codec.json_end.strip()
        self._header: tuple[str, str | None] | None = None
        self._scanner = JsonScanner()
        self._started = False

    def read(self, text: str, position: int, final: bool) -> int:
        if self._header is None:
            position = self._read_header(text, position)
        if self._header is not None and self._scanner.status is Status.MORE:
            position = self._read_arguments(text, position, final)
        if self._scanner.status is Status.DONE and self.status is Status.MORE:
            position = self._read_end(text, position, final)
        return position

    def _read_header(self, text: str, position: int) -> int:
        """The header is over at its end marker, or where the arguments begin if the marker was forgotten."""
        brace = text.find("{", position)
        limit = len(text) if brace < 0 else brace
        end = text.find(self._header_end, position, limit)
        if (limit if end < 0 else end) - position > _MAX_HEADER:
            self.status = Status.BAD
            return position
        if end < 0 and brace < 0:
            return position
        self._header = self._codec.parse_header(text[position : brace if end < 0 else end])
        if self._header is None:
            self.status = Status.BAD
            return position
        return brace if end < 0 else end + len(self._header_end)

    def _read_arguments(self, text: str, position: int, final: bool) -> int:
        begin = skip_space(text, position)
        if not self._started:
            if begin == len(text):
                return position
            if text[begin] != "{" or self._header is None or not self._sink.start(*self._header):
                self.status = Status.BAD
                return position
            self._started = True
        position = self._scanner.scan(text, position, final)
        fragment = self._scanner.take()
        if fragment:
            self._sink.arguments(fragment)
        if self._scanner.status is Status.BAD:
            self.status = Status.BAD
        self.complete = self._scanner.status is Status.DONE
        return position

    def _read_end(self, text: str, position: int, final: bool) -> int:
        if self._json_end:
            begin = skip_space(text, position)
            found = match(text, begin, self._json_end)
            if found is Match.PARTIAL and not final:
                return position
            if found is Match.FULL:
                position = begin + len(self._json_end)
        self.status = Status.DONE
        return position
