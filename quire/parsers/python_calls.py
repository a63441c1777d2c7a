"""Calls written as Python calls with keyword arguments that are literals."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.parsers.argument_grammar import ANY_KEY, free_arguments, in_order, properties, with_definitions
from quire.parsers.codec import CallSink, Codec, Reader, Status
from quire.parsers.format import Tool
from quire.parsers.json_scan import JsonScanner, to_json
from quire.parsers.lark import Lark, many, optional
from quire.parsers.scan import MAX_NAME, NAME, skip_space
from quire.types.errors import RequestError

_INTERESTING = re.compile(r"""["'()\[\]{},\\]""")
KEY = re.compile(r"""[^\s"'()\[\]{},=\\]+""")
_KEYWORD = re.compile(rf"\s*({KEY.pattern})\s*=(?!=)")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonCall(Codec):
    """`name(key=literal, ...)`."""

    def begins(self, char: str) -> bool:
        return char.isalpha() or char == "_"

    def reader(self, sink: CallSink, tools: Mapping[str, Tool]) -> Reader:
        return _PythonReader(sink)

    def render(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        return f"{name}({', '.join(f'{key}={to_json(value)}' for key, value in arguments.items())})"

    def grammar(self, tool: Tool, lark: Lark) -> str:
        comma = lark.literal(", ")
        if free_arguments(tool):
            item = f'{ANY_KEY} "=" {lark.schema({})}'
            arguments = optional(f"{item} {many(f'{comma} {item}')}")
        else:
            for name, _, _ in properties(tool):
                if KEY.fullmatch(name) is None:
                    raise RequestError(
                        f"{tool.name!r} has an argument {name!r}, which this model's tool format cannot write; "
                        "use letters, digits and underscores",
                        field="tools",
                    )
            items = [
                (f"{lark.literal(f'{name}=')} {lark.schema(with_definitions(schema, tool))}", required)
                for name, schema, required in properties(tool)
            ]
            arguments = in_order(lark, items, comma)
        return f"{lark.literal(f'{tool.name}(')} {arguments} {lark.literal(')')}"


class _PythonReader(Reader):
    """Passes each argument on when it is complete."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._name = ""
        self._started = False
        self._num_arguments = 0
        self._seen = 0  # how many characters of the argument at the current position have been looked at
        self._quote = ""
        self._open: list[str] = []

    def read(self, text: str, position: int, final: bool) -> int:
        if not self._name:
            position = self._read_name(text, position)
        while self._name and self.status is Status.MORE:
            end = self._argument_end(text, position)
            if end < 0:
                return position
            position = self._read_argument(text, position, end)
        return position

    def _read_name(self, text: str, position: int) -> int:
        begin = skip_space(text, position)
        if begin == len(text):
            return position
        found = NAME.match(text, begin)
        if found is None or (found.end() < len(text) and text[found.end()] != "(") or len(found[0]) == MAX_NAME:
            self.status = Status.BAD
            return position
        if found.end() == len(text):
            return position
        self._name = found[0]
        return found.end() + 1

    def _argument_end(self, text: str, position: int) -> int:
        """Where the comma or the parenthesis after this argument stands; -1 if it has not come yet."""
        at = position + self._seen
        while (found := _INTERESTING.search(text, at)) is not None:
            char, at = found[0], found.end()
            if char == "\\":
                if at == len(text):
                    self._seen = at - 1 - position
                    return -1
                at += 1
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in _CLOSERS:
                self._open.append(_CLOSERS[char])
            elif char != "," and self._open:
                if self._open.pop() != char:
                    self.status = Status.BAD
                    return -1
            elif not self._open:
                self._seen = 0
                return at - 1
        self._seen = len(text) - position
        return -1

    def _read_argument(self, text: str, position: int, end: int) -> int:
        source = text[position:end]
        ends_call = text[end] == ")"
        if text[end] not in ",)":
            self.status = Status.BAD
            return position
        if ends_call and not source.strip():
            return self._finish(position, end)
        keyword = _KEYWORD.match(source)
        value = None if keyword is None else _literal(source[keyword.end() :].strip())
        if keyword is None or value is None or not self._start():
            self.status = Status.BAD
            return position
        self._sink.arguments(f"{'{' if self._num_arguments == 0 else ', '}{to_json(keyword[1])}: {value}")
        self._num_arguments += 1
        return self._finish(position, end) if ends_call else end + 1

    def _finish(self, position: int, end: int) -> int:
        if not self._start():
            self.status = Status.BAD
            return position
        self._sink.arguments("}" if self._num_arguments else "{}")
        self.complete = True
        self.status = Status.DONE
        return end + 1

    def _start(self) -> bool:
        self._started = self._started or self._sink.start(self._name)
        return self._started


def _literal(source: str) -> str | None:
    """A literal of Python or of JSON as JSON, or None if it is neither."""
    scanner = JsonScanner()
    if scanner.scan(source, 0, final=True) == len(source) and scanner.status is Status.DONE:
        return scanner.take()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes, which Python takes as they are
            return to_json(_value(ast.parse(source, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not (value is None or isinstance(value, (str, int, float))):
        raise ValueError(f"{value!r} is no value of JSON")
    return value


def _key(node: ast.expr | None) -> str:
    key = None if node is None else ast.literal_eval(node)
    if not isinstance(key, str):
        raise ValueError(f"{key!r} is no key of an object")
    return key
