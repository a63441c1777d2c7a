"""Keywords that no backend knows: what is said under a rewritten schema obeys the original, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.structured.guidance import GuidanceBackend
from quire.structured.instance import NotCheckedError, Validator
from quire.structured.schema import SchemaCheck
from quire.structured.sources import make_source
from quire.types.structured import GrammarError, StructuredOutputsParams
from tests.structured.schemas import SCHEMAS, VALUES
from tests.structured.words import EOS, NUM_WORDS, allowed, speak


def accepts(backend: GuidanceBackend, schema: Any, text: str) -> bool:
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = backend.compile(make_source(params)).matcher()
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
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        valid = validator.is_valid(value)
        try:
            accepted = accepts(backend, schema, spelled(value))
        except GrammarError:
            accepted = False  # nothing obeys it, and so should no value
        assert valid or not accepted, value
        assert accepted or not valid or not is_exact, value


@settings(max_examples=120, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**20))
def test_whatever_is_said_obeys_the_original(backend: GuidanceBackend, schema: Any, seed: int) -> None:
    check_what_is_said(backend, schema, seed)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_values_are_judged_as_by_the_reference(schema: Any, value: Any) -> None:
    try:
        valid = Validator(schema, GuidanceBackend.check_text).is_valid(schema, value)
    except NotCheckedError:
        assert "unevaluatedProperties" in schema
    else:
        assert valid == jsonschema.Draft202012Validator(schema).is_valid(value)
