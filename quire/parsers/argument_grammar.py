"""The grammar of arguments that are written one by one rather than as one JSON object.

A tool's schema is then held to property by property: what only an object as a whole can obey is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.parsers.format import Tool
from quire.parsers.lark import ANY_TEXT, Lark, choice, optional, regex
from quire.parsers.values import argument_types, resolve
from quire.types.errors import RequestError

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_UNDERSTOOD = _ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "strict"),
    *("$defs", "definitions", "$schema", "$id"),
}
_TEXT_KEYWORDS = _ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
_WORDS = {"null": "/null|None/", "boolean": "/true|false|True|False/"}
_LOOKS_LIKE = {
    "null": r"\s*(?i:null|none)\s*",
    "boolean": r"\s*(?i:true|false)\s*",
    "integer": r"\s*-?[0-9](?s:.*)",
    "number": r"\s*-?[0-9](?s:.*)",
    "object": r"\s*\{(?s:.*)",
    "array": r"\s*\[(?s:.*)",
}


def object_schema(tool: Tool) -> dict[str, Any]:
    """The tool's schema, with the type object."""
    return {**tool.parameters, "type": "object"}


def properties(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required, of each argument in order."""
    changed = not tool.parameters.keys() <= _UNDERSTOOD
    keywords = tool.written if changed and tool.written else tuple(tool.parameters)
    odd = [keyword for keyword in keywords if keyword not in _UNDERSTOOD and not keyword.startswith("x-")]
    if odd:
        raise RequestError(
            f"the parameters of {tool.name!r} use {odd[0]!r}, which this model's tool format cannot be held to, as "
            "it writes arguments one by one; use properties and required only, or tool_choice 'auto' without strict",
            field="tools",
        )
    required = set(tool.parameters.get("required") or ())
    declared = tool.parameters.get("properties") or {}
    missing = sorted(required - set(declared))
    if missing:
        raise RequestError(
            f"the parameters of {tool.name!r} require {missing[0]!r}, which is none of its properties; declare it",
            field="tools",
        )
    return [(name, schema, name in required) for name, schema in declared.items()]


def with_definitions(schema: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """A property's schema on its own, with what it may refer to."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {**shared, **schema} if isinstance(schema, Mapping) else {}


def in_order(lark: Lark, items: Sequence[tuple[str, bool]], between: str) -> str:
    """These items in order, those that are not required perhaps left out, with something between them."""
    if not between:
        return " ".join(item if required else optional(item) for item, required in items) or '""'
    # For each item from the last on: what may follow if nothing stands before it, and if something does.
    first, later = '""', '""'
    for item, required in reversed(items):
        next_first, next_later = [f"{item} {later}"], [f"{between} {item} {later}"]
        if not required:
            next_first.append(first)
            next_later.append(later)
        first, later = lark.rule(choice(next_first)), lark.rule(choice(next_later))
    return first


ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def plain_value(lark: Lark, tool: Tool, name: str, schema: Mapping[str, Any], end: str) -> str:
    """A value as plain text and its `end`: strings as they are, everything else as JSON."""
    types = argument_types(tool.parameters, name)
    if types and "string" not in types:
        return f"{lark.schema(with_definitions(schema, tool))} {lark.literal(end)}"
    branches = [resolve(branch, tool.parameters) for branch in _branches(resolve(schema, tool.parameters))]
    texts = [
        _text(lark, tool, name, branch, types - {"string"}, end)
        for branch in branches
        if not types or "string" in _types_of(branch, tool)
    ]
    others = [
        f"{lark.schema(with_definitions(branch, tool))} {lark.literal(end)}"
        for branch in map(_not_text, branches)
        if branch is not None and types and not _is_word(branch, tool)
    ]
    return choice(list(dict.fromkeys(texts + others)))


def strings_and_others(tool: Tool, schema: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A schema in parts: what it allows of strings, and what of other types."""
    branches = [resolve(branch, tool.parameters) for branch in _branches(resolve(schema, tool.parameters))]
    texts, others = [], []
    for branch in branches:
        types, rest = _types_of(branch, tool), _not_text(branch)
        if not types or "string" in types:
            texts.append({**branch, "type": "string"})
        if rest is not None and types != {"string"}:
            others.append(dict(rest) if types else {**rest, "type": sorted(_LOOKS_LIKE)})
    return texts, others


def _types_of(schema: Mapping[str, Any], tool: Tool) -> frozenset[str]:
    return argument_types({**tool.parameters, "properties": {"it": schema}}, "it")


def _is_word(schema: Mapping[str, Any], tool: Tool) -> bool:
    """Whether it is null, true or false: these are written as a kind of text, not to be mistaken for the text."""
    return _types_of(schema, tool) <= set(_WORDS) and not {"enum", "const"} & set(schema)


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    options = schema.get("anyOf") or schema.get("oneOf")
    return [option for option in options if isinstance(option, Mapping)] if options else [schema]


def _not_text(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a schema allows besides strings."""
    declared = schema.get("type")
    if declared == "string":
        return None
    values = schema.get("enum")
    if isinstance(values, list):
        rest = [value for value in values if not isinstance(value, str)]
        return {**schema, "enum": rest} if rest else None
    if isinstance(declared, list):
        kinds = [kind for kind in declared if kind != "string"]
        return {**schema, "type": kinds} if kinds else None
    return None if isinstance(schema.get("const"), str) else schema


def _text(lark: Lark, tool: Tool, name: str, schema: Mapping[str, Any], others: frozenset[str], end: str) -> str:
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        return choice([lark.literal(value + end) for value in values if isinstance(value, str)])
    odd = [keyword for keyword in schema if keyword not in _TEXT_KEYWORDS and not keyword.startswith("x-")]
    if odd:
        raise RequestError(
            f"the argument {name!r} of {tool.name!r} uses {odd[0]!r}, which this model's tool format cannot be held "
            "to, as it writes strings as plain text; use enum, pattern, minLength or maxLength",
            field="tools",
        )
    parts = []
    if "pattern" in schema:
        parts.append(regex(_anchored(str(schema["pattern"]))))
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    parts += [f"~{regex(_LOOKS_LIKE[kind])}" for kind in sorted(others) if kind in _LOOKS_LIKE]
    return text_until(lark, end, parts, [_WORDS[kind] for kind in sorted(others) if kind in _WORDS])


def text_until(lark: Lark, end: str, parts: Sequence[str] = (), words: Sequence[str] = ()) -> str:
    """Text that is all of `parts` or one of `words`, up to the first `end`."""
    marker = end.strip()
    before, after = end[: end.index(marker)], end[end.index(marker) + len(marker) :]
    text = " | ".join((" & ".join(dict.fromkeys((ANY_TEXT, *parts))), *words))
    body = lark.terminal(f"({text}) {lark.literal(before)}") if parts and before else f"({text})"
    rest = f" {lark.literal(after)}" if after else ""
    return f"{lark.until([marker], lark.terminal(body))}{rest}"


def _anchored(pattern: str) -> str:
    """JSON schema's patterns match anywhere; a grammar's match as a whole."""
    begins = pattern.startswith("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    body = pattern[1 if begins else 0 : -1 if ends else None]
    return f"{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}"


def free_arguments(tool: Tool) -> bool:
    """Whether the schema says nothing of the arguments, so that there may be any."""
    closed = tool.parameters.get("additionalProperties") is False
    return not (closed or tool.parameters.get("properties") or tool.parameters.get("required"))
