"""Structural tags: text is free until a trigger, then held to the tag; both forms of writing them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from quire.structured.guidance import GuidanceBackend
from quire.structured.sources import make_source
from quire.types.structured import GrammarError, StructuredOutputsParams
from tests.structured.words import EOS, NUM_WORDS, allowed


def says(backend: GuidanceBackend, tag: dict[str, Any], text: str) -> str:
    """ "no" if the text cannot be said, "yes" if it may end there, else "more"."""
    source = make_source(StructuredOutputsParams(structural_tag=json.dumps(tag)))
    matcher = backend.compile(source).matcher()
    if not matcher.accept(list(text.encode())):
        return "no"
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    backend.fill([matcher], masks)
    return "yes" if EOS in allowed(masks) else "more"


TAGS = [
    {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"},
    {"begin": "<f=y>", "content": {"type": "json_schema", "json_schema": {"enum": ["q"]}}, "end": "</f>"},
]
NO_SCHEMA = {"not": {"pattern": "a"}}
OLD = {
    "structures": [{"begin": t["begin"], "schema": t["content"]["json_schema"], "end": t["end"]} for t in TAGS],
    "triggers": ["<f="],
}
NEW = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}}


def test_schemas_are_rewritten(backend: GuidanceBackend) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "integer", "not": {"const": 1}}, "end": ""}]}
    assert says(backend, {**tag, "triggers": ["<f>"]}, "<f>2") == "yes"
    assert says(backend, {**tag, "triggers": ["<f>"]}, "<f>1") == "more"


@pytest.mark.parametrize("tag", [OLD, NEW], ids=["structures", "format"])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "yes"),
        ("any text < f = at all", "yes"),
        ("text <f=", "more"),
        ("<f=x>12", "more"),
        ("<f=x>12</f>", "yes"),
        ("<f=x>12</f> and text", "yes"),
        ('<f=x>12</f><f=y>"q"</f>', "yes"),
        ("<f=x>12</f><f=", "more"),
        ("<f=z", "no"),
        ("<f=x>word", "no"),
        ("text <f=y>12", "no"),
    ],
)
def test_triggers(backend: GuidanceBackend, tag: dict[str, Any], text: str, answer: str) -> None:
    assert says(backend, tag, text) == answer


@pytest.mark.parametrize(
    ("content", "answers"),
    [
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "at_least_one": True},
            {"text": "more", "<f=x>1</f>": "yes", "<f=x>1</f> on": "yes"},
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "stop_after_first": True},
            {"text": "yes", "<f=x>1</f>": "yes", "<f=x>1</f> on": "no"},
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                    {"type": "json_schema", "json_schema": {"enum": ["z"]}},
                ],
            },
            {"<think>a < b": "more", "<think>a</think>": "more", '<think>a</think>"z"': "yes", "hello": "no"},
        ),
        (
            {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, "tags": TAGS},
            {"": "more", "<f=x>1</f>": "yes", '<f=x>1</f>\n<f=y>"q"</f>': "yes", "<f=x>1</f><": "no"},
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "stop_after_first": True, "tags": TAGS},
            {"": "yes", "<f=x>1</f>": "yes", "<f=x>1</f>,": "no"},
        ),
        (
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": 'say "a/b"'}, {"type": "regex", "pattern": "[0-9]/x"}],
            },
            {'say "a/b"': "yes", "7/x": "yes", "7": "more", "x": "no"},
        ),
    ],
    ids=lambda value: value.get("type", "") if isinstance(value, dict) else "",
)
def test_formats(backend: GuidanceBackend, content: dict[str, Any], answers: dict[str, str]) -> None:
    assert {text: says(backend, {"format": content}, text) for text in answers} == answers


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({}, "format is None but must be an object"),
        ({"format": {"type": "poem"}}, "format has type 'poem' but must have one of const_string"),
        ({"format": {"type": "sequence", "elements": []}}, "format.elements is empty"),
        ({"format": {"type": "tag", "begin": 1, "end": ""}}, "format.begin is 1 but must be text"),
        ({"format": {"type": "triggered_tags", "triggers": ["<g"], "tags": TAGS}}, "with which no tag begins"),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<f=x"], "tags": TAGS}},
            "begins with none of the triggers",
        ),
        ({"structures": [{"begin": "a", "end": "", "schema": NO_SCHEMA}], "triggers": ["a"]}, "not at #/not"),
        ([], "must be a JSON object"),
    ],
)
def test_mistakes_are_named(tag: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as info:
        make_source(StructuredOutputsParams(structural_tag=json.dumps(tag)))
    assert (info.value.field or "").startswith("structured_outputs.structural_tag")
