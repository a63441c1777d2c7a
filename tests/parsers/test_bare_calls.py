"""Calls as bare JSON: recognized where nothing but calls was said, whole and by name; anywhere else they are text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsers.events import TextDelta, assemble, joined
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from tests.parsers.helpers import NAMES, SEEDS, TEXTS, cuts, feed, parser_for, values

TOOLS = [Tool("f"), Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}})]
F = '{"name": "f", "arguments": {"a": 1}}'
MARKED = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ONE = [("f", {"a": 1})]

# An output, its text, and its calls.
CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (F, "", ONE),
    (f"\n {F}\n", "", ONE),
    (f"{F}\n{F}", "", ONE * 2),
    (f"{F}\n\n{MARKED}", "", [*ONE, ("f", {})]),
    (f"{MARKED}\n{F}", "", [("f", {}), *ONE]),
    (f"{F}\nThat should do.", "That should do.", ONE),
    ('{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}', "", ONE),
    ('{"arguments": {"a": 1}, "name": "f"}', "", ONE),
    ('{"name": "f", "parameters": {"a": 1}}', "", ONE),
    ('{"type": "function", "name": "f", "arguments": "{\\"a\\": 1}"}', "", ONE),
    ('{"name": "f", "arguments": {"a": "x\ny"}}', "", [("f", {"a": "x\ny"})]),
    # not a tool, not complete, not a call
    (F.replace('"f"', '"g"'), F.replace('"f"', '"g"'), []),
    (F[:-1], F[:-1], []),
    ('{"name": "f"}', '{"name": "f"}', []),
    ('{"name": "f", "arguments": {}, "age": 3}', '{"name": "f", "arguments": {}, "age": 3}', []),
    ('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}', []),
    ("{ and so on", "{ and so on", []),
    ("{}\n", "{}\n", []),
    # in the middle of prose
    (f"Sure: {F}", f"Sure: {F}", []),
    (f"Sure:\n{F}", f"Sure:\n{F}", []),
    (f"Sure:\n\n```json\n{F}\n```", f"Sure:\n\n```json\n{F}\n```", []),
    (f"{F} is how f is called.", f"{F} is how f is called.", []),
    (f"{F}, or so", f"{F}, or so", []),
    (f"Hm. {MARKED}\n{F}", f"Hm.\n{F}", [("f", {})]),
]


@pytest.mark.parametrize(("output", "text", "calls"), CASES)
@pytest.mark.parametrize("tool", ["hermes", "qwen3_coder", "mistral"])
def test_bare_calls(tool: str, output: str, text: str, calls: list[tuple[str, Any]]) -> None:
    if MARKED in output and tool != "hermes":
        return  # the marked call is one of that format
    for pieces in ([output], list(output)):
        parsed = assemble(feed(make_parser(tool, None, prompt_text="", tools=TOOLS), pieces))
        assert parsed.text == text
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
        assert all(call.complete for call in parsed.calls)


def test_they_come_after_thinking_and_not_within() -> None:
    parsed = assemble(feed(parser_for("hermes", "qwen3", TOOLS), [f"<think>\n{F}\n</think>\n\n{F}"]))
    assert (parsed.reasoning, parsed.text, [call.name for call in parsed.calls]) == (F, "", ["f"])


def test_they_are_left_alone_where_they_mean_something_else() -> None:
    for options in ({"bare_calls": False}, {"tools": ()}, {"parse_tools": False}):
        parsed = assemble(feed(make_parser("hermes", None, prompt_text="", **{"tools": TOOLS, **options}), [F]))
        assert (parsed.text, parsed.calls) == (F, ())


def test_calls_of_strict_tools_obey_their_schemas() -> None:
    """No grammar holds them to it where they begin without a marker."""
    strict = Tool("f", {"type": "object", "properties": {"a": {"type": "integer", "pattern": "x"}}}, strict=True)
    for output, is_call in ((F, True), (F.replace("1", '"one"'), False)):
        parsed = assemble(feed(make_parser("hermes", None, prompt_text="", tools=[strict]), [output]))
        assert (parsed.text == "", len(parsed.calls)) == (is_call, int(is_call))


def test_other_answers_are_held_back_no_longer_than_it_takes_to_tell() -> None:
    parser = make_parser("hermes", None, prompt_text="", tools=TOOLS)
    assert parser.feed('{"res') == []
    assert parser.feed('ult": ') == [TextDelta('{"result":')]
    assert parser.feed("1") == [TextDelta(" 1")]
    parser = make_parser("hermes", None, prompt_text="", tools=TOOLS)
    assert parser.feed("I") == [TextDelta("I")]


@st.composite
def outputs(draw: st.DrawFn) -> str:
    """Calls, bare or marked, known or not, whole or damaged, with and without text around them."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        arguments = st.dictionaries(st.text(max_size=4), values(TEXTS), max_size=3)
        value = {"name": draw(st.sampled_from([*NAMES, "unknown"])), "arguments": draw(arguments)}
        call = json.dumps(value, indent=draw(st.sampled_from([None, 2])), ensure_ascii=draw(st.booleans()))
        marked = f"<tool_call>\n{call}\n</tool_call>"
        damaged = call[: draw(st.integers(0, len(call)))]
        parts.append(draw(st.sampled_from([call, call, call, marked, damaged]) | TEXTS))
        parts.append(draw(st.sampled_from(["\n", "\n\n", "", " ", "\r\n", "\u00a0"])))
    return draw(st.sampled_from(["", "", "\n", "<think>\nHm\n</think>\n\n"])) + "".join(parts)


@settings(max_examples=150, deadline=None)
@given(output=outputs(), seed=SEEDS)
def test_the_cuts_do_not_matter(output: str, seed: int) -> None:
    tools = [Tool(name) for name in NAMES]
    whole = joined(feed(parser_for("hermes", "qwen3", tools), [output]))
    for pieces in cuts(output, seed, 5):
        assert joined(feed(parser_for("hermes", "qwen3", tools), pieces)) == whole
    parsed = assemble(whole)
    plain = assemble(feed(parser_for("hermes", "qwen3", tools, bare_calls=False), [output]))
    assert {call.name for call in parsed.calls if call.complete} <= set(NAMES) | {call.name for call in plain.calls}
    if len(parsed.calls) == len(plain.calls):
        assert parsed == plain
    assert parsed.reasoning == plain.reasoning
