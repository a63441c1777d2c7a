"""StructuredOutputsParams: exactly one constraint, and a canonical source that crosses processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.types.errors import RequestError
from quire.types.messages import Command, ToEngine
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource, StructuredOutputsParams, Vocabulary


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": "x"},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_contradictions(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as info:
        StructuredOutputsParams(**values)
    assert info.value.field == field


@pytest.mark.parametrize(
    "values",
    [{"json": {}}, {"json": "{}"}, {"json_object": True}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "g"}],
)
def test_one_constraint_is_named(values: dict[str, Any]) -> None:
    params = StructuredOutputsParams(**values)
    assert params.constraint == next(iter(values))
    sampling = SamplingParams(structured_outputs=params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


def test_the_key_is_the_content() -> None:
    sources = [
        GrammarSource("regex", "a"),
        GrammarSource("regex", "b"),
        GrammarSource("choice", "a"),
        GrammarSource("json", "a"),
        GrammarSource("json", "a", ""),
    ]
    assert len({source.key for source in sources}) == len(sources)
    assert GrammarSource("regex", "a").key == sources[0].key


def test_a_vocabulary_reaches_the_engine() -> None:
    vocabulary = Vocabulary([b"a", b"\xff", b""], [2], [2])
    sent = msgspec.msgpack.encode(Command(1, "set_vocabulary", vocabulary))
    command = msgspec.msgpack.decode(sent, type=ToEngine)
    assert isinstance(command, Command)
    assert msgspec.convert(command.argument, Vocabulary) == vocabulary
