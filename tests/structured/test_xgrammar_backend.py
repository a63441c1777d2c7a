"""The xgrammar backend: what it takes, it enforces; the rest is refused. Nightly: importing it takes seconds."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.structured.base import Backend
from quire.structured.registry import BACKENDS
from quire.structured.sources import make_source
from quire.types.structured import GrammarError, GrammarLimits, StructuredOutputsParams
from tests.structured.test_schema import ENFORCED, validator_of
from tests.structured.test_separate import OBJECTS, SCHEMAS, VALUES
from tests.structured.words import EOS, VOCABULARY, go_and_come_back, speak

LIMITS = GrammarLimits("xgrammar")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def xgrammar() -> Backend:
    return BACKENDS.get("xgrammar")(VOCABULARY)


def said(backend: Backend, seed: int = 0, **params: Any) -> str | None:
    """What is said, None if it did not come to an end."""
    one = speak(backend, StructuredOutputsParams(**params), seed, limits=LIMITS)
    return one.text if one.is_finished else None


def test_schemas_are_enforced_or_refused(xgrammar: Backend) -> None:
    enforced = 0
    for name, schema in ENFORCED.items():
        try:
            texts = [said(xgrammar, seed, json=schema) for seed in range(4)]
        except GrammarError:
            continue
        enforced += 1
        for text in texts:
            assert text is None or validator_of(name).validate(json.loads(text)) is None, name
    assert enforced >= 40


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_keywords_side_by_side_are_all_enforced(xgrammar: Backend, schema: dict[str, Any]) -> None:
    grammar = xgrammar.compile(make_source(StructuredOutputsParams(json=schema), LIMITS))
    for value in VALUES + OBJECTS:
        matcher = grammar.matcher()
        taken = matcher.accept(list(json.dumps(value).encode())) and (matcher.is_complete or matcher.accept([EOS]))
        assert taken == Draft202012Validator(schema).is_valid(value), value


def test_the_other_kinds(xgrammar: Backend) -> None:
    for seed in range(10):
        assert re.fullmatch("[a-c]{2,4}x?", said(xgrammar, seed, regex="[a-c]{2,4}x?") or "")
        assert said(xgrammar, seed, choice=["yes", "no"]) in ("yes", "no")
        assert said(xgrammar, seed, grammar='root ::= "a" | "bc"') in ("a", "bc")


def test_an_output_ends_where_nothing_may_follow(xgrammar: Backend) -> None:
    matcher = xgrammar.compile(make_source(StructuredOutputsParams(regex="a[0-9]{1,2}"), LIMITS)).matcher()
    seen = []
    for character in b"a12":
        assert matcher.accept([character])
        seen.append(matcher.is_complete)
    assert seen == [False, False, True]
    assert not matcher.accept([ord("3")])
    assert matcher.error


def test_what_is_tried_is_taken_back(xgrammar: Backend) -> None:
    go_and_come_back(xgrammar.compile(make_source(StructuredOutputsParams(regex="a(b|cd)?"), LIMITS)).matcher(), EOS)


def test_errors(xgrammar: Backend) -> None:
    with pytest.raises(GrammarError, match="grammar cannot be compiled"):
        said(xgrammar, grammar="root ::= nothing")
    with pytest.raises(GrammarError, match="whitespace_pattern is not understood"):
        said(xgrammar, json={"type": "null"}, whitespace_pattern="x")
    with pytest.raises(GrammarError, match="oneOf at #/oneOf is not supported"):
        said(xgrammar, json={"oneOf": [{"type": "string"}, {"enum": ["a", "b"]}]})
    with pytest.raises(GrammarError, match="format at #/format is not supported"):
        said(xgrammar, json={"type": "string", "format": "date"})


def test_whitespace_is_limited(xgrammar: Backend) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 3}
    matcher = xgrammar.compile(make_source(StructuredOutputsParams(json=schema), LIMITS)).matcher()
    assert matcher.accept(list(b"[" + b" " * 17))
    assert not matcher.accept(list(b" "))
