"""Python calls are read as Python reads them, as far as JSON has the values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from quire.parsers.events import assemble
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from tests.parsers.helpers import SEEDS, TEXTS, cuts, feed, values


@given(values(TEXTS), SEEDS)
def test_literals_come_back_as_python_writes_them(value: Any, seed: int) -> None:
    output = f"[f(a={value!r}, b=1)]"
    for pieces in cuts(output, seed, 2):
        parsed = assemble(feed(make_parser("pythonic", None, prompt_text="", tools=[Tool("f")]), pieces))
        assert [json.loads(call.arguments) for call in parsed.calls] == [{"a": value, "b": 1}]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("true", True),
        ("[null, False]", [None, False]),
        ("'a' 'b'", "ab"),
        (r"'\x41\u00e9'", "Aé"),
        (r"r'\d'", r"\d"),
        ("'tab\\d'", "tab\\d"),
        ("(1, 2)", [1, 2]),
        ("-1", -1),
        ("1_000", 1000),
        ('"""x, y"""', "x, y"),
        ("{'a': {'b': (1,)}}", {"a": {"b": [1]}}),
    ],
)
def test_spellings_that_json_lacks(source: str, value: Any) -> None:
    parsed = assemble(feed(make_parser("pythonic", None, prompt_text="", tools=[Tool("f")]), [f"[f(a={source})]"]))
    assert json.loads(parsed.calls[0].arguments) == {"a": value}


@pytest.mark.parametrize(
    "source",
    ["x", "f(1)", "1 + 1", "{1: 2}", "{1}", "b'x'", "1j", "...", "lambda: 0", "[x for x in y]", "'a"],
)
def test_what_is_no_value_makes_no_call(source: str) -> None:
    output = f"[f(a={source})]"
    parsed = assemble(feed(make_parser("pythonic", None, prompt_text="", tools=[Tool("f")]), [output]))
    assert (parsed.text, parsed.calls) == (output, ())


def test_absurd_nesting_is_refused_quietly() -> None:
    output = f"[f(a={'[' * 5_000}{']' * 5_000}, b={'(' * 5_000}1{')' * 5_000})]"
    parsed = assemble(feed(make_parser("pythonic", None, prompt_text="", tools=[Tool("f")]), [output]))
    assert len(parsed.calls) == 1
    assert not parsed.calls[0].complete
