"""Arguments that come as text get the types that the schema asks for."""

from __future__ import annotations

from typing import Any

import pytest

from quire.parsers.values import argument_types, convert

ROOT = {
    "properties": {
        "plain": {"type": "string"},
        "many": {"type": ["integer", "null"]},
        "union": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Number"}]},
        "enum": {"enum": ["a", 1, None, 1.5]},
        "const": {"const": True},
        "ref": {"$ref": "#/$defs/Loop"},
        "free": {},
        "odd": True,
    },
    "$defs": {"Number": {"type": "number"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "array"}]}},
}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("plain", {"string"}),
        ("many", {"integer", "null"}),
        ("union", {"string", "number"}),
        ("enum", {"string", "integer", "null", "number"}),
        ("const", {"boolean"}),
        ("ref", {"array"}),
        ("free", set()),
        ("odd", set()),
        ("unknown", set()),
    ],
)
def test_types_are_found(name: str, types: set[str]) -> None:
    assert argument_types(ROOT, name) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"integer"}, "3"),
        (" 3\n", {"integer"}, "3"),
        ("3", {"string"}, '"3"'),
        ("3", {"string", "integer"}, "3"),
        ("three", {"integer"}, '"three"'),
        ("True", {"boolean"}, "true"),
        ("false", {"boolean"}, "false"),
        ("None", {"string", "null"}, "null"),
        ("null", {"string"}, '"null"'),
        ("true", {"string", "null"}, '"true"'),
        ("1.50", {"number"}, "1.50"),
        ("NaN", {"number"}, '"NaN"'),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[1, 2]", {"array"}, "[1, 2]"),
        ('"quoted"', {"string"}, '"\\"quoted\\""'),
        ('"quoted"', set(), '"\\"quoted\\""'),
        ("12", set(), "12"),
        ("[1", set(), '"[1"'),
        ("words", set(), '"words"'),
        ("", {"integer"}, '""'),
    ],
)
def test_text_becomes_json(text: str, types: set[str], value: Any) -> None:
    assert convert(text, frozenset(types)) == value
