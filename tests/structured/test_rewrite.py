"""Keywords that no backend knows: what is said under a rewritten schema obeys the original, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, SecretStr

from quire.structured.base import Grammar
from quire.structured.guidance import GuidanceBackend
from quire.structured.instance import NotCheckedError, Validator
from quire.structured.schema import SchemaCheck
from quire.structured.sources import make_source, relax_schema
from quire.types.structured import GrammarError, StructuredOutputsParams
from tests.structured.schemas import SCHEMAS, VALUES
from tests.structured.words import EOS, NUM_WORDS, allowed, speak


def accepts(backend: GuidanceBackend, grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    if not matcher.accept(list(text.encode())):
        return False
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    backend.fill([matcher], masks)
    return matcher.is_complete or EOS in allowed(masks)


def spelled(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def rewritten(schema: Any) -> SchemaCheck:
    backend = GuidanceBackend
    check = SchemaCheck(backend.schema_support, backend.check_regex, backend.check_text, "schema")
    check.run(schema)
    return check


def check_what_is_said(backend: GuidanceBackend, schema: Any, seed: int) -> None:
    params = StructuredOutputsParams(json=schema)
    try:
        backend.compile(make_source(params))
    except GrammarError:
        return
    for index in range(2):
        one = speak(backend, params, seed + index, max_tokens=150)
        if one.is_finished:
            jsonschema.Draft202012Validator(schema).validate(json.loads(one.text))


def check_what_may_be_said(backend: GuidanceBackend, schema: Any, values: list[Any]) -> None:
    try:
        is_exact = rewritten(schema).is_exact
        source = make_source(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    except GrammarError:
        return
    try:
        grammar = backend.compile(source)
    except GrammarError:
        grammar = None  # nothing obeys it, and so should no value
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        valid = validator.is_valid(value)
        accepted = grammar is not None and accepts(backend, grammar, spelled(value))
        assert valid or not accepted, value
        assert accepted or not valid or not is_exact, value


@settings(max_examples=70, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**20))
def test_whatever_is_said_obeys_the_original(backend: GuidanceBackend, schema: Any, seed: int) -> None:
    check_what_is_said(backend, schema, seed)


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=3, max_size=6))
def test_what_obeys_the_original_may_be_said(backend: GuidanceBackend, schema: Any, values: list[Any]) -> None:
    check_what_may_be_said(backend, schema, values)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=5_000, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**20), values=st.lists(VALUES, min_size=3, max_size=6))
def test_many_schemas(backend: GuidanceBackend, schema: Any, seed: int, values: list[Any]) -> None:
    check_what_is_said(backend, schema, seed)
    check_what_may_be_said(backend, schema, values)


@settings(max_examples=120, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_values_are_judged_as_by_the_reference(schema: Any, value: Any) -> None:
    try:
        valid = Validator(schema, GuidanceBackend.check_text).is_valid(schema, value)
    except NotCheckedError:
        assert "unevaluatedProperties" in json.dumps(schema)
    else:
        assert valid == jsonschema.Draft202012Validator(schema).is_valid(value)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    password: SecretStr


class Owner(BaseModel):
    home: Path
    photo: bytes
    site: AnyUrl
    age: timedelta
    colours: set[Literal["red", "green", "blue"]]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pair: tuple[int, str]


def test_schemas_of_classes_are_taken(backend: GuidanceBackend) -> None:
    schema = Owner.model_json_schema()
    for word in ("path", "binary", "password", "uniqueItems", "oneOf"):
        assert word in json.dumps(schema), "what this test is about"
    finished = 0
    for seed in range(8):
        one = speak(backend, StructuredOutputsParams(json=schema, disable_additional_properties=True), seed)
        finished += one.is_finished
        if one.is_finished:
            jsonschema.validate(json.loads(one.text), schema)
    assert finished


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ({"pattern": "b+"}, "abba", True),
        ({"pattern": "^b+$"}, "abba", False),
        ({"pattern": "(?=b)"}, "abba", None),
        ({"pattern": "."}, "\x7f", None),
        ({"pattern": "."}, "\ud800", None),
        ({"format": "date"}, "2024-02-29", True),
        ({"format": "date"}, "today", False),
    ],
)
def test_texts_are_judged_without_backtracking(rule: dict[str, str], text: str, answer: bool | None) -> None:
    assert GuidanceBackend.check_text(rule, text) is answer


def test_a_value_is_judged_within_a_budget() -> None:
    names = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)}
    schema = {"$defs": {**names, "d40": {}}, "$ref": "#/$defs/d0"}
    with pytest.raises(NotCheckedError, match="too long"):
        Validator(schema, GuidanceBackend.check_text).check(schema, 1)
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    with pytest.raises(NotCheckedError, match="too deep"):
        Validator({"items": {"$ref": "#"}}, GuidanceBackend.check_text).check({"items": {"$ref": "#"}}, deep)


def deep_in(part: Callable[[Any], Any], levels: int = 15) -> Any:
    schema: Any = {"type": "object", "required": ["a"]}
    for _ in range(levels):
        schema = part(schema)
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep_in(lambda inner: {"if": inner, "then": {"required": ["a"]}, "else": {"required": ["b"]}}),
        deep_in(lambda inner: {"contains": inner}),
        deep_in(lambda inner: {"not": {"items": {"not": {"items": inner}}}}, 7),
        {"properties": {str(n): {"items": {"enum": list(range(9))}, "uniqueItems": True} for n in range(300)}},
    ],
    ids=["if", "contains", "not items", "uniqueItems"],
)
def test_what_multiplies_is_refused_at_once(schema: Any) -> None:
    """Without bounds each of these takes more memory than there is."""
    with pytest.raises(GrammarError, match="too many"):
        make_source(StructuredOutputsParams(json=schema))
    relaxed, not_enforced = relax_schema(StructuredOutputsParams(json=schema))
    assert not_enforced
    assert make_source(relaxed)
