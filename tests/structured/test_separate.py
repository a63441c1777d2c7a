"""Schemas for a backend that reads one keyword at a time: the same values obey, and no keyword can be ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.structured.sources import make_source, relax_schema
from quire.types.structured import GrammarError, GrammarLimits, StructuredOutputsParams

LIMITS = GrammarLimits("xgrammar")
NULL = {"type": "null"}
ALONE = {"enum", "const", "$ref", "anyOf"}
SCHEMAS: list[dict[str, Any]] = [
    {"minimum": 3},
    {"exclusiveMaximum": 3},
    {"minItems": 2},
    {"items": NULL},
    {"prefixItems": [NULL]},
    {"properties": {"a": NULL}},
    {"properties": {"a": {"minimum": 3}}, "type": "object"},
    {"required": ["a"]},
    {"additionalProperties": NULL},
    {"minItems": 1, "minimum": 3},
    {"properties": {"a": NULL}, "items": NULL},
    {"type": ["array", "null"], "minItems": 2},
    {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": -3}]},
    {"anyOf": [{"type": "integer"}, NULL, False], "minimum": 3},
    {"enum": [1, 2, 3, "a"], "minimum": 2},
    {"enum": [1, 2, 3, "a"], "type": ["integer", "null"], "maximum": 2},
    {"const": 5, "minimum": 2},
    {"enum": [1, "a"], "anyOf": [{"type": "string"}, NULL]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"minimum": 3}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a", "title": "A"}}, "$defs": {"a": {"minItems": 1}}},
]
VALUES = [1, 5, -5, 2.5, "a", None, True, [], [1], [1, 2], [None], [None, None], {}]
OBJECTS: list[Any] = [{"a": 1}, {"a": None}, {"a": 5}, {"a": []}, {"a": [1]}, {"b": 1}, {"b": None}]


def parts(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [part for item in schema for part in parts(item)]
    if not isinstance(schema, dict):
        return []
    return [schema, *(part for value in schema.values() for part in parts(value))]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_same_values_obey(schema: dict[str, Any]) -> None:
    separated = json.loads(make_source(StructuredOutputsParams(json=schema), LIMITS).text)
    for value in VALUES + OBJECTS:
        assert Draft202012Validator(separated).is_valid(value) == Draft202012Validator(schema).is_valid(value), value
    for part in parts(separated):
        if not part.keys().isdisjoint(ALONE):
            assert len(part.keys() - {"$defs"}) == 1
        elif not part.keys().isdisjoint({"minimum", "items", "minItems", "required"}):
            assert "type" in part


@pytest.mark.parametrize(
    ("schema", "keyword", "reason"),
    [
        ({"const": 1, "minimum": 2}, "const", "has no value that obeys"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "minimum", "beside a $ref"),
        ({"required": ["a"], "anyOf": [{"required": ["b"]}]}, "anyOf", "the same keywords"),
        ({"additionalProperties": False, "anyOf": [{"properties": {"a": NULL}}]}, "anyOf", "the same keywords"),
    ],
)
def test_what_cannot_be_separated_is_refused_by_name(schema: dict[str, Any], keyword: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        make_source(StructuredOutputsParams(json=schema), LIMITS)
    assert caught.value.keyword == keyword
    assert reason in str(caught.value)


def test_a_schema_that_is_not_strict_loses_what_stands_beside_a_reference() -> None:
    schema = {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}
    relaxed, lost = relax_schema(StructuredOutputsParams(json=schema), LIMITS)
    assert lost == ["minimum at #/minimum"]
    assert json.loads(make_source(relaxed, LIMITS).text)["$ref"] == "#/$defs/a"
