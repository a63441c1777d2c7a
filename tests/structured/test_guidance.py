"""The llguidance backend: all kinds of sources, where outputs may end, and errors that say what is wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest

from quire.structured.guidance import GuidanceBackend
from quire.structured.sources import is_large, make_source
from quire.types.structured import GrammarError, StructuredOutputsParams
from tests.structured.words import EOS, NUM_WORDS, OTHER_EOS, TOOL, VOCABULARY, allowed, go_and_come_back, speak


@pytest.mark.parametrize("pattern", [r"[a-c]{3}/\d+", "é+|😀", r"(foo|bar)\n?", r"\$\{x\}\"", "(?i)abc"])
def test_regex(backend: GuidanceBackend, pattern: str) -> None:
    for seed in range(10):
        one = speak(backend, StructuredOutputsParams(regex=pattern), seed)
        assert not one.is_finished or re.fullmatch(pattern, one.text)


def test_choice(backend: GuidanceBackend) -> None:
    choices = ["yes", "no", 'may"be', "a\nb", "é", "yes, really"]
    said = {speak(backend, StructuredOutputsParams(choice=choices), seed).text for seed in range(60)}
    assert said <= set(choices)
    assert len(said) >= 4


def test_one_of_many_thousand_choices(backend: GuidanceBackend) -> None:
    choices = [f"number {index} of many" for index in range(20_000)]
    one = speak(backend, StructuredOutputsParams(choice=choices))
    assert one.is_finished
    assert one.text in choices


@pytest.mark.parametrize("grammar", ['root ::= "a" [0-9]+ "b"', 'start: "a" DIGIT+ "b"\nDIGIT: /[0-9]/'])
def test_grammars_in_both_languages(backend: GuidanceBackend, grammar: str) -> None:
    one = speak(backend, StructuredOutputsParams(grammar=grammar))
    assert re.fullmatch("a[0-9]+b", one.text)


def test_special_tokens_are_reached_by_name_only(backend: GuidanceBackend) -> None:
    masks = np.zeros((2, NUM_WORDS), dtype=np.int32)
    named = backend.compile(make_source(StructuredOutputsParams(grammar='start: <|tool|> "x"'))).matcher()
    spelled = backend.compile(make_source(StructuredOutputsParams(choice=["<|tool|>"]))).matcher()
    backend.fill([named, spelled], masks)
    assert allowed(masks, 0) == [TOOL]
    assert allowed(masks, 1) == [ord("<")]


def test_an_output_may_end_exactly_where_the_grammar_may(backend: GuidanceBackend) -> None:
    matcher = backend.compile(make_source(StructuredOutputsParams(regex="ab?[0-9]{1,2}"))).matcher()
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    seen = []
    for character in b"a12":
        backend.fill([matcher], masks)
        seen.append({EOS, OTHER_EOS} <= set(allowed(masks)))
        assert not matcher.is_complete
        assert matcher.accept([character])
    assert seen == [False, False, True]
    assert matcher.is_complete
    assert matcher.error is None


def test_tokens_that_span_parts_are_allowed(backend: GuidanceBackend) -> None:
    matcher = backend.compile(make_source(StructuredOutputsParams(regex="ab12"))).matcher()
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    backend.fill([matcher], masks)
    assert allowed(masks) == [ord("a"), VOCABULARY.pieces.index(b"ab")]


def test_what_is_tried_is_taken_back(backend: GuidanceBackend) -> None:
    matcher = backend.compile(make_source(StructuredOutputsParams(regex="a(b|cd)?"))).matcher()
    go_and_come_back(matcher, EOS)


def test_matchers_of_one_grammar_are_apart(backend: GuidanceBackend) -> None:
    grammar = backend.compile(make_source(StructuredOutputsParams(choice=["ax", "by"])))
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept([ord("a")])
    masks = np.zeros((2, NUM_WORDS), dtype=np.int32)
    backend.fill([first, second], masks)
    assert (allowed(masks, 0), allowed(masks, 1)[:2]) == ([ord("x")], [ord("a"), ord("b")])
    assert not second.accept([ord("z")])
    assert second.error


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "(?=a)b"}, "regex is .* look-around"),
        ({"regex": "["}, "unclosed character class"),
        ({"grammar": "start: unknown_rule"}, 'grammar cannot be compiled: unknown name: "unknown_rule"'),
        ({"grammar": "start: <|none|>"}, "unknown special token"),
        ({"grammar": "what is this"}, "neither Lark nor GBNF"),
        ({"grammar": "start: start"}, "grammar cannot be compiled: no text obeys it"),
        ({"json": {"$ref": "#"}}, "json cannot be compiled: no text obeys it"),
        (
            {"json": {"type": "number", "not": {"type": "integer"}}},
            "json cannot be compiled: no value obeys all of it that a grammar can say",
        ),
        ({"choice": ["a", ""]}, "strings that are not empty"),
        ({"regex": ""}, "text that is not empty"),
    ],
)
def test_errors(backend: GuidanceBackend, params: dict[str, object], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        backend.compile(make_source(StructuredOutputsParams(**params)))  # type: ignore[arg-type]  # wrong on purpose


def test_large_sources_are_told() -> None:
    assert not is_large(StructuredOutputsParams(json={"type": "object"}))
    assert not is_large(StructuredOutputsParams(json_object=True))
    assert is_large(StructuredOutputsParams(json={"enum": list(range(3000))}))
    assert is_large(StructuredOutputsParams(json={"properties": {"a": {"uniqueItems": True}}}))
    assert is_large(StructuredOutputsParams(json='{"not": {"type": "null"}}'))
    assert is_large(StructuredOutputsParams(choice=["word"] * 1000))
    assert is_large(StructuredOutputsParams(regex="a" * 5000))
