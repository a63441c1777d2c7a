"""JSON schemas: whatever is said under one is valid under it, and what cannot be enforced is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from quire.structured.guidance import GuidanceBackend
from quire.structured.sources import make_source
from quire.types.structured import GrammarError, GrammarLimits, StructuredOutputsParams
from tests.structured.words import speak

S, N = {"type": "string", "maxLength": 4}, {"type": "integer", "minimum": 0, "maximum": 99}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


# In the shape of the standard's own suite: a schema per use of a keyword.
ENFORCED: dict[str, Any] = {
    "type: boolean": {"type": "boolean"},
    "type: null": {"type": "null"},
    "type: integer": {"type": "integer"},
    "type: number": {"type": "number"},
    "type: string": {"type": "string"},
    "type: list": {"type": ["boolean", "null", "integer"]},
    "type: array": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    "enum: of one type": {"enum": ["red", "green", "blue"]},
    "enum: of many types": {"enum": [1, "a", None, True, {"b": [1, 2]}, 2.5]},
    "enum: with type": {"type": "string", "enum": ["a", 1, "b"]},
    "const: text": {"const": 'with "quotes" and \\'},
    "const: object": {"const": {"a": [1, {"b": None}]}},
    "const: unicode": {"const": "é😀"},
    "properties: required": closed({"a": N, "b": S}),
    "properties: optional": closed({"a": N, "b": S, "c": {"type": "null"}}, ["b"]),
    "properties: none required": closed({"a": N, "b": N}, []),
    "properties: nested": closed({"a": closed({"b": closed({"c": N})})}),
    "properties: odd names": closed({'quo"te': N, "back\\slash": N, "é": N, "": N, "$ref": N}),
    "properties: false": {"type": "object", "properties": {"a": False, "b": N}, "additionalProperties": False},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "additionalProperties: with properties": {
        "type": "object",
        "properties": {"a": N},
        "required": ["a"],
        "additionalProperties": {"type": "null"},
    },
    "required: not in properties": {"type": "object", "required": ["z"], "additionalProperties": {"type": "boolean"}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^n_[a-c]$": {"type": "integer"}, "^s_[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "minProperties": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "minProperties: of those listed": closed({"a": N, "b": N, "c": N}, [], minProperties=2),
    "minProperties: or another": {"type": "object", "properties": {"a": N}, "minProperties": 1},
    "maxProperties: of those listed": closed({"a": N, "b": N, "c": N}, ["b"], maxProperties=2),
    "maxProperties": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    "items": {"type": "array", "items": N, "minItems": 1, "maxItems": 4},
    "prefixItems": {"type": "array", "prefixItems": [N, S], "items": False},
    "prefixItems: and items": {"type": "array", "prefixItems": [N], "items": {"type": "null"}, "maxItems": 4},
    "minItems": {"type": "array", "items": {"type": "null"}, "minItems": 3},
    "maxItems": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    "minItems and maxItems": {"type": "array", "items": N, "minItems": 2, "maxItems": 2},
    "minLength": {"type": "string", "minLength": 5},
    "maxLength": {"type": "string", "maxLength": 3},
    "maxLength: counts characters": {"type": "string", "minLength": 2, "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$"},
    "pattern: not anchored": {"type": "string", "pattern": "x[0-9]y"},
    "pattern: alternatives": {"type": "string", "pattern": "^(foo|ba[rz])$"},
    "pattern: and length": {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 4},
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "maximum": -5},
    "minimum and maximum": {"type": "integer", "minimum": -12, "maximum": 37},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 5},
    "number bounds": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2.25},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 100},
    "anyOf": {"anyOf": [{"type": "boolean"}, N, closed({"a": N})]},
    "oneOf: of different types": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "oneOf: told apart by a constant": {
        "oneOf": [closed({"kind": {"const": "a"}, "x": N}), closed({"kind": {"const": "b"}, "y": S})]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "allOf: objects": {
        "allOf": [
            {"type": "object", "properties": {"a": N}, "required": ["a"]},
            {"type": "object", "properties": {"b": N}, "required": ["b"]},
        ],
        "properties": {"a": N, "b": N},
        "additionalProperties": False,
    },
    "$ref": {"$defs": {"n": N}, **closed({"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}})},
    "$ref: definitions": {"definitions": {"n/~x": N}, **closed({"a": {"$ref": "#/definitions/n~1~0x"}})},
    "$ref: recursive": {
        "$defs": {"node": closed({"v": N, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    "$ref: to the whole": closed({"v": N, "next": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, ["v"]),
    "annotations say nothing": {
        "title": "T", "description": "D", "default": 3, "examples": [1], "$comment": "c", "deprecated": True,
        "readOnly": True, "x-mine": {"not": {}}, "uniqueItems": False, "type": "array", "items": N, "maxItems": 2,
    },
    "uniqueItems: of an enum": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
    "uniqueItems: of a longer enum": {"type": "array", "items": {"enum": list("abcdefghi")}, "uniqueItems": True},
    "uniqueItems: of few numbers": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3},
                                    "uniqueItems": True, "minItems": 2},
    "uniqueItems: one at most": {"type": "array", "items": S, "uniqueItems": True, "maxItems": 1},
    "uniqueItems: of different kinds": {"type": "array", "prefixItems": [S, N], "items": False, "uniqueItems": True},
    "propertyNames: enum": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": N},
    "propertyNames: pattern": {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": N},
    "propertyNames: length": {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": N},
    "propertyNames: not": {"type": "object", "propertyNames": {"not": {"enum": ["a", "b"]}}, "properties": {"a": N}},
    "contains": {"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"const": 7}, "maxItems": 5},
    "contains: so many": {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 2,
                          "maxContains": 3, "maxItems": 5},
    "not: a type": {"not": {"type": ["string", "object", "array", "number"]}},
    "not: a value": {"type": "string", "maxLength": 3, "not": {"enum": ["a", "abc", 'q"']}},
    "not: numbers": {"type": "integer", "minimum": 0, "maximum": 5, "not": {"enum": [0, 3, 5.0]}},
    "not: required": closed({"a": N, "b": N}, [], **{"not": {"required": ["a", "b"]}}),
    "if, then, else": closed(
        {"kind": {"enum": ["a", "b"]}, "x": N, "y": N}, ["kind"],
        **{"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
    ),
    "dependentRequired": closed({"a": N, "b": N, "c": N}, [], dependentRequired={"a": ["b"], "b": ["c"]}),
    "dependentSchemas": closed({"a": N, "b": N}, [], dependentSchemas={"a": {"properties": {"b": {"maximum": 3}}}}),
    "dependencies": closed({"a": N, "b": N}, [], dependencies={"a": ["b"]}),
    "oneOf: overlapping texts": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "oneOf: overlapping numbers": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "oneOf: overlapping objects": {"type": "object", "properties": {"a": N, "b": N}, "additionalProperties": False,
                                   "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "unevaluatedProperties": {"type": "object", "properties": {"a": N}, "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [N, S], "unevaluatedItems": False},
    "conditions in definitions": {
        "$defs": {"set": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}},
        **closed({"a": {"$ref": "#/$defs/set"}, "b": {"$ref": "#/$defs/set"}}),
    },
    "exclusive bounds of draft 4": {"type": "integer", "minimum": 2, "exclusiveMinimum": True, "maximum": 4,
                                    "exclusiveMaximum": False},
    **{
        f"format: {name} says nothing": {"type": kind, "format": name}
        for name, kind in [("int64", "integer"), ("password", "string"), ("path", "string"), ("binary", "string"),
                           ("uri-reference", "string"), ("float", "number")]
    },
    "draft 4 tuples": {"type": "array", "items": [N, S], "additionalItems": False},
    **{
        f"format: {name}": {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    },
}  # fmt: skip


def validator_of(name: str) -> Any:
    """The reference's validator for one of these schemas, of the draft that it is written in."""
    old = {
        "draft 4 tuples": jsonschema.Draft7Validator,
        "dependencies": jsonschema.Draft7Validator,
        "exclusive bounds of draft 4": jsonschema.Draft4Validator,
    }
    if name in old:
        return old[name](ENFORCED[name])
    newest = jsonschema.Draft202012Validator
    return newest(ENFORCED[name], format_checker=newest.FORMAT_CHECKER)


@pytest.mark.parametrize("name", ENFORCED)
def test_whatever_is_said_is_valid(backend: GuidanceBackend, name: str) -> None:
    said = [speak(backend, StructuredOutputsParams(json=ENFORCED[name]), seed) for seed in range(5)]
    finished = [one for one in said if one.is_finished]
    assert finished, "nothing came to an end"
    for one in finished:
        validator_of(name).validate(json.loads(one.text))


def test_any_object_is_an_object(backend: GuidanceBackend) -> None:
    said = [speak(backend, StructuredOutputsParams(json_object=True), seed) for seed in range(20)]
    assert all(isinstance(json.loads(one.text), dict) for one in said if one.is_finished)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"not": {"pattern": "a"}}, "not", "#/not"),
        ({"not": {"const": [1]}}, "not", "#/not"),
        ({"not": 3}, "schema", "#/not"),
        ({"properties": {"a": {"if": {"multipleOf": 3}, "then": {}}}}, "if", "#/properties/a/if"),
        ({"type": "array", "items": {"uniqueItems": True}}, "uniqueItems", "#/items/uniqueItems"),
        ({"items": {"enum": list(range(12))}, "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
        ({"type": "array", "uniqueItems": "yes"}, "uniqueItems", "#/uniqueItems"),
        ({"contains": {}, "minContains": 9}, "contains", "#/contains"),
        ({"propertyNames": {"pattern": "a", "minLength": 3}}, "propertyNames", "#/propertyNames"),
        ({"dependentRequired": {"a": "b"}}, "dependentRequired", "#/dependentRequired"),
        ({"type": "object", "minProperties": 2}, "minProperties", "#/minProperties"),
        ({"properties": {str(n): {} for n in range(20)}, "maxProperties": 9}, "maxProperties", "#/maxProperties"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties", "#/unevaluatedProperties"),
        ({"oneOf": [{"$ref": "#/oneOf/1"}, {"type": "null"}]}, "$ref", "#/oneOf/0/$ref"),
        ({"dependentRequired": {str(n): ["a"] for n in range(12)}}, "dependentRequired", "#/dependentRequired"),
        ({"$defs": {"a/b": {"$dynamicRef": "#x"}}}, "$dynamicRef", "#/$defs/a~1b/$dynamicRef"),
        ({"anyOf": [{}, {"format": 3}]}, "format", "#/anyOf/1/format"),
        ({"pattern": "(?=a)"}, "pattern", "#/pattern"),
        ({"pattern": "(a)\\1"}, "pattern", "#/pattern"),
        ({"pattern": 3}, "pattern", "#/pattern"),
        ({"patternProperties": {"[": {}}}, "patternProperties", "#/patternProperties/["),
        ({"$ref": "#/$defs/none"}, "$ref", "#/$ref"),
        ({"$ref": "https://example.org/schema.json"}, "$ref", "#/$ref"),
        ({"type": "text"}, "type", "#/type"),
        ({"type": []}, "type", "#/type"),
        ({"enum": []}, "enum", "#/enum"),
        ({"anyOf": []}, "anyOf", "#/anyOf"),
        ({"minLength": -1}, "minLength", "#/minLength"),
        ({"maxItems": 1.5}, "maxItems", "#/maxItems"),
        ({"minimum": "1"}, "minimum", "#/minimum"),
        ({"multipleOf": 0}, "multipleOf", "#/multipleOf"),
        ({"required": "a"}, "required", "#/required"),
        ({"properties": []}, "properties", "#/properties"),
        ({"items": 3}, "schema", "#/items"),
        ({"properties": {str(n): {} for n in range(1001)}}, "properties", "#/properties"),
        (deep(70), "nesting", None),
        (deep(5000), "nesting", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(schema: dict[str, Any], keyword: str, path: str | None) -> None:
    with pytest.raises(GrammarError) as info:
        make_source(StructuredOutputsParams(json=schema))
    assert (info.value.field, info.value.keyword) == ("structured_outputs.json", keyword)
    if path is not None:
        assert info.value.path == path
        assert f"{keyword} at {path} " in str(info.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "^a"}]},
        {"type": "object", "properties": {"a": {}}, "required": ["z"], "additionalProperties": False},
        {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#"}, {"required": ["a"]}]}}},
    ],
)
def test_what_only_the_compiler_finds_is_a_typed_error_too(backend: GuidanceBackend, schema: dict[str, Any]) -> None:
    source = make_source(StructuredOutputsParams(json=schema))
    with pytest.raises(GrammarError, match=r"structured_outputs\.json cannot be compiled: [$\w]+") as info:
        backend.compile(source)
    for word in ("Enable", "coerce", "option", "x-guidance", "json-schema://", "failed to compile"):
        assert word not in str(info.value), "the library's words help nobody here"


def test_what_says_nothing_does_not_make_a_new_grammar() -> None:
    plain = make_source(StructuredOutputsParams(json={"type": "object", "properties": {"title": {"type": "null"}}}))
    noisy = {"title": "x", "type": "object", "properties": {"title": {"description": "d", "type": "null"}}}
    assert make_source(StructuredOutputsParams(json=json.dumps(noisy, indent=2))).key == plain.key
    other = make_source(StructuredOutputsParams(json={"type": "object", "properties": {"titel": {"type": "null"}}}))
    assert other.key != plain.key


def test_objects_can_be_closed_from_outside(backend: GuidanceBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": N}}}}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    for seed in range(10):
        one = speak(backend, params, seed)
        assert not one.is_finished or json.loads(one.text).keys() <= {"a"}


def test_whitespace(backend: GuidanceBackend) -> None:
    schema = closed({"a": N, "b": N})
    for seed in range(5):
        assert " " not in speak(backend, StructuredOutputsParams(json=schema, disable_any_whitespace=True), seed).text
        one = speak(backend, StructuredOutputsParams(json=schema, whitespace_pattern="_?"), seed)
        assert set(one.text) <= set('{}",:_ab0123456789')
    for seed in range(20):
        between = re.findall(r"\s+", speak(backend, StructuredOutputsParams(json=schema), seed).text)
        assert all(re.fullmatch(r"[ \t]|\r?\n[ \t]{0,16}", blanks) for blanks in between)
    with pytest.raises(GrammarError, match="whitespace_pattern"):
        make_source(StructuredOutputsParams(json=schema, whitespace_pattern="("))


def test_limits() -> None:
    limits = GrammarLimits(max_bytes=50)
    with pytest.raises(GrammarError, match=r"has \d+ bytes but at most 50"):
        make_source(StructuredOutputsParams(json={"enum": ["x" * 60]}), limits)
    with pytest.raises(GrammarError, match="not JSON"):
        make_source(StructuredOutputsParams(json="{"))
    with pytest.raises(GrammarError, match="nested"):
        make_source(StructuredOutputsParams(json="[" * 100_000))
    with pytest.raises(GrammarError, match="what JSON cannot"):
        make_source(StructuredOutputsParams(json={"const": float("nan")}))
    with pytest.raises(GrammarError, match="lone surrogate"):
        make_source(StructuredOutputsParams(regex="\ud800"))
