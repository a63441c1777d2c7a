"""Structural tags: free text in which a trigger starts a constrained part. Turns both of their forms into Lark.

The older form lists `structures` (begin, schema, end) and `triggers`; the newer one is a tree of formats under
`format`. Knows the two forms, and of grammars only how rules are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.types.structured import GrammarError

FIELD = "structured_outputs.structural_tag"
InlineSchema = Callable[[str], str]

_KINDS = (
    "const_string",
    "json_schema",
    "any_text",
    "regex",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)
_WORDS: dict[type[Any], str] = {str: "text", list: "a list", dict: "an object"}
_TEXT = r"/(?s:.*)/"


def lark_of_tag(tag: Mapping[str, Any], inline_schema: InlineSchema) -> str:
    """The grammar of a structural tag, without a header."""
    rules = _Rules(inline_schema)
    if "structures" in tag:
        content = {
            "type": "triggered_tags",
            "triggers": tag.get("triggers"),
            "tags": [
                {
                    "begin": _get(part, f"structures[{index}]", "begin", str),
                    "content": {"type": "json_schema", "json_schema": part.get("schema", {})},
                    "end": _get(part, f"structures[{index}]", "end", str),
                }
                for index, part in enumerate(_get(tag, "", "structures", list))
            ],
        }
        start = rules.rule_of(content, "structures")
    else:
        start = rules.rule_of(_get(tag, "", "format", dict), "format")
    return "\n".join([f"start: {start}", *rules.lines, ""])


class _Rules:
    """Collects rules while it walks over the formats."""

    def __init__(self, inline_schema: InlineSchema) -> None:
        self.lines: list[str] = []
        self._inline_schema = inline_schema

    def rule_of(self, content: Any, path: str) -> str:
        """The name of a rule for one format; `path` says where it stands."""
        if not isinstance(content, dict):
            raise _wrong(path, f"is {content!r:.60} but must be an object with a type")
        kind = content.get("type")
        match kind:
            case "const_string":
                body = _literal(_get(content, path, "value", str))
            case "json_schema":
                body = self._schema(content, path)
            case "any_text":
                body = _TEXT
            case "regex":
                body = _regex(_get(content, path, "pattern", str))
            case "sequence":
                body = " ".join(self._all(content, path, "elements"))
            case "or":
                body = " | ".join(self._all(content, path, "elements"))
            case "tag":
                body = self._tag(content, path)
            case "triggered_tags":
                body = self._triggered(content, path)
            case "tags_with_separator":
                body = self._separated(content, path)
            case _:
                raise _wrong(path, f"has type {kind!r:.60} but must have one of {', '.join(_KINDS)}", "type")
        return self._add(body)

    def _add(self, body: str) -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _schema(self, content: Mapping[str, Any], path: str) -> str:
        schema = content.get("json_schema", {})
        if not isinstance(schema, (dict, bool)):
            raise _wrong(f"{path}.json_schema", f"is {schema!r:.60} but must be a JSON schema")
        return self._inline_schema(json.dumps(schema))

    def _all(self, content: Mapping[str, Any], path: str, name: str) -> list[str]:
        parts = _get(content, path, name, list)
        if not parts:
            raise _wrong(f"{path}.{name}", "is empty but must have at least one entry")
        return [self.rule_of(part, f"{path}.{name}[{index}]") for index, part in enumerate(parts)]

    def _tag(self, tag: Any, path: str, after: int = 0) -> str:
        """A tag, less the first `after` characters of its begin."""
        if not isinstance(tag, dict):
            raise _wrong(path, f"is {tag!r:.60} but must be an object with begin, content and end")
        begin = _get(tag, path, "begin", str)[after:]
        content = tag.get("content")
        end = _get(tag, path, "end", str)
        if isinstance(content, dict) and content.get("type") == "any_text":
            # Text goes on until the end of the tag, which is part of the same lazy token.
            return " ".join(filter(None, [_literal(begin), self._text_until(end) if end else _TEXT]))
        return " ".join(filter(None, [_literal(begin), self.rule_of(content, f"{path}.content"), _literal(end)]))

    def _text_until(self, end: str) -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {_regex('(?s:.*)' + re.escape(end))}")
        return name

    def _triggered(self, content: Mapping[str, Any], path: str) -> str:
        """Text, and after each trigger the rest of a tag that begins with it."""
        triggers = _get(content, path, "triggers", list)
        tags = _get(content, path, "tags", list)
        calls: list[str] = []
        used: set[int] = set()
        for number, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise _wrong(f"{path}.triggers[{number}]", f"is {trigger!r:.60} but must be text that is not empty")
            rests = []
            for index, tag in enumerate(tags):
                if isinstance(tag, dict) and str(tag.get("begin", "")).startswith(trigger):
                    rests.append(self._add(self._tag(tag, f"{path}.tags[{index}]", len(trigger))))
                    used.add(index)
            if not rests:
                raise _wrong(f"{path}.triggers[{number}]", f"is {trigger!r:.60}, with which no tag begins")
            calls.append(self._add(f"{self._text_until(trigger)} ({' | '.join(rests)})"))
        for index in range(len(tags)):
            if index not in used:
                raise _wrong(f"{path}.tags[{index}].begin", "begins with none of the triggers")
        if not calls:
            raise _wrong(f"{path}.triggers", "is empty but must have at least one entry")
        one = self._add(" | ".join(calls))
        text = self._add(_TEXT)
        must_call = content.get("at_least_one")
        if content.get("stop_after_first"):
            return one if must_call else f"{one} | {text}"
        return f"{one}{'+' if must_call else '*'} {text}"

    def _separated(self, content: Mapping[str, Any], path: str) -> str:
        tags = _get(content, path, "tags", list)
        if not tags:
            raise _wrong(f"{path}.tags", "is empty but must have at least one entry")
        rules = [self._add(self._tag(tag, f"{path}.tags[{index}]")) for index, tag in enumerate(tags)]
        one = self._add(" | ".join(rules))
        separator = _literal(_get(content, path, "separator", str))
        more = "" if content.get("stop_after_first") else f" ({separator} {one})*"
        return f"{one}{more}" if content.get("at_least_one") else f"({one}{more})?"


def _get(content: Any, path: str, name: str, kind: type[Any]) -> Any:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind):
        where = f"{path}.{name}".removeprefix(".")
        raise _wrong(where, f"is {value!r:.60} but must be {_WORDS[kind]}", name)
    return value


def _wrong(path: str, message: str, keyword: str | None = None) -> GrammarError:
    return GrammarError(f"{FIELD}: {path} {message}", FIELD, keyword, path)


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", "\\/").replace("\n", "\\n") + "/"


def with_schemas(content: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A structural tag with its JSON schemas changed; `change` gets the path of a schema and the schema."""
    if isinstance(content, list):
        return [with_schemas(part, change, f"{path}[{index}]") for index, part in enumerate(content)]
    if not isinstance(content, dict):
        return content
    found = {}
    for name, part in content.items():
        here = f"{path}.{name}".removeprefix(".")
        is_schema = name in ("json_schema", "schema")
        found[name] = change(here, part) if is_schema else with_schemas(part, change, here)
    return found
