"""Grammars allow what generators write, nothing that breaks a schema, and only what parses back to valid calls."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest

from quire.parsers.events import CallEnd, Event, ParsedOutput, assemble
from quire.parsers.format import Tool
from quire.parsers.generate import Turn, render_turn
from quire.parsers.grammar import ToolChoice, grammar_for
from quire.types.errors import RequestError
from tests.parsers.grammar_walk import Walker, begin_of_calls
from tests.parsers.helpers import PAIRS, feed, parser_for

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"$ref": "#/$defs/Unit"},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
            "near": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["celsius", "kelvin"]}},
    },
    strict=True,
)
TIME = Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
FREE = Tool("free")
TOOLS = {tool.name: tool for tool in (WEATHER, TIME, FREE)}
FULL = {"city": "Zü<b>rich\n", "days": 3, "unit": "kelvin", "note": None, "near": [True], "code": "CH"}
GOOD: list[list[tuple[str, dict[str, Any]]]] = [
    [("get_weather", FULL)],
    [("get_weather", {"city": "", "unit": "celsius", "note": "abc"})],
    [("get_time", {}), ("get_weather", {"city": "x", "unit": "celsius"}), ("get_time", {})],
    [("free", {"a": "text"})],
]
BAD = [
    ("get_weather", {"city": "x"}),
    ("get_weather", {"city": "x", "unit": "miles"}),
    ("get_weather", {"city": "x", "days": 99, "unit": "kelvin"}),
    ("get_weather", {"city": "x", "days": "three", "unit": "kelvin"}),
    ("get_weather", {"city": "x", "unit": "kelvin", "note": "abcdef"}),
    ("get_weather", {"city": "x", "unit": "kelvin", "code": "ch"}),
    ("get_weather", {"city": "x", "unit": "kelvin", "more": 1}),
    ("get_time", {"a": 1}),
    ("unknown", {}),
]

every_format = pytest.mark.parametrize(("tool", "reasoning"), PAIRS)


@functools.cache
def walker(tool: str, reasoning: str) -> Walker:
    return Walker(tool, reasoning)


def grammar(tool: str, reasoning: str, choice: ToolChoice, **kwargs: Any) -> str:
    kwargs = {"tools": list(TOOLS.values()), "special_tokens": walker(tool, reasoning).special, **kwargs}
    return grammar_for(tool, tool_choice=choice, reasoning_format=reasoning, **kwargs)


def calls_of(tool: str, calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return calls[:1] if tool == "harmony" else calls  # which has one call to a turn


def check_calls(parsed: ParsedOutput) -> None:
    for call in parsed.calls:
        assert call.complete
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, dict(TOOLS[call.name].parameters))


@every_format
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_is_right_is_allowed(tool: str, reasoning: str, choice: ToolChoice) -> None:
    allowed = grammar(tool, reasoning, choice)
    for calls in GOOD:
        for thinking in ("", "Hm, <b>so</b>"):
            output = render_turn(Turn(reasoning=thinking, calls=calls_of(tool, calls)), tool, reasoning)
            assert walker(tool, reasoning).accepts(allowed, output), output


@every_format
def test_thinking_that_is_open_goes_on(tool: str, reasoning: str) -> None:
    if tool == "harmony":
        return  # its prompts never end inside of thinking
    allowed = grammar(tool, reasoning, "required", reasoning_open=True)
    calls = render_turn(Turn(reasoning="Hm", calls=[("get_time", {})]), tool, reasoning, reasoning_open=True)
    assert walker(tool, reasoning).accepts(allowed, calls)
    assert not walker(tool, reasoning).accepts(allowed, "Hm")


@every_format
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_breaks_a_schema_is_not(tool: str, reasoning: str, choice: ToolChoice) -> None:
    allowed = grammar(tool, reasoning, choice)
    for name, arguments in BAD:
        output = render_turn(Turn(calls=[(name, arguments)]), tool, reasoning)
        assert not walker(tool, reasoning).accepts(allowed, output), output


@every_format
def test_required_wants_a_call_and_named_only_one(tool: str, reasoning: str) -> None:
    one = render_turn(Turn(calls=[("get_time", {})]), tool, reasoning)
    two = render_turn(Turn(calls=[("get_time", {})] * 2), tool, reasoning)
    required = grammar(tool, reasoning, "required")
    named = grammar(tool, reasoning, "named", tools=[TIME])
    single = grammar(tool, reasoning, "required", parallel=False)
    walks = walker(tool, reasoning)
    assert not walks.accepts(required, "")
    assert not walks.begins(required, "Hello there")
    assert walks.accepts(required, two) == (tool != "harmony")
    for allowed in (named, single):
        assert walks.accepts(allowed, one)
        assert not walks.accepts(allowed, two)
    assert not walks.accepts(named, render_turn(Turn(calls=[("free", {})]), tool, reasoning))


@every_format
def test_auto_leaves_text_alone(tool: str, reasoning: str) -> None:
    allowed = grammar(tool, reasoning, "auto")
    for turn in (
        Turn("Hello <b>, 1 < 2 and so on."),
        Turn("Yes.", reasoning="Hm"),
        Turn("Let me see.", calls=[("get_time", {})]),
        Turn("Yes.", reasoning=f"I could say {begin_of_calls(tool)} but not now"),
    ):
        if any(token in turn.reasoning for token in walker(tool, reasoning).special):
            continue  # a token that begins calls is not allowed among thoughts
        output = render_turn(turn, tool, reasoning)
        assert walker(tool, reasoning).accepts(allowed, output), output


@every_format
def test_whatever_is_allowed_parses_and_validates(tool: str, reasoning: str) -> None:
    allowed = grammar(tool, reasoning, "required")
    ended = 0
    for seed in range(6):
        output = walker(tool, reasoning).walk(allowed, seed)
        if output is None:
            continue
        ended += 1
        parsed = assemble(feed(parser_for(tool, reasoning, list(TOOLS.values())), [output]))
        assert parsed.calls, output
        assert parsed.text == "", output
        check_calls(parsed)
    assert ended >= 2


@every_format
def test_calls_that_begin_in_text_obey_their_schemas(tool: str, reasoning: str) -> None:
    if tool == "harmony":
        return  # its calls begin no text; the walks above are the same
    allowed = grammar(tool, reasoning, "auto", tools=[WEATHER, TIME])
    walks = walker(tool, reasoning)
    start = "Let me see.\n" + (begin_of_calls(tool) or {"llama3_json": "{"}.get(tool, "["))
    start += "[" if tool == "phi4_mini" else ""
    assert walks.begins(allowed, start)
    assert not walks.begins(allowed, start + "?")
    assert not walks.accepts(allowed, start)

    def parse(output: str) -> list[Event]:
        return parser_for(tool, reasoning, list(TOOLS.values())).feed(output)

    def has_called(output: str) -> bool:
        return any(isinstance(event, CallEnd) for event in parse(output))

    outputs = [walks.walk(allowed, seed, start=start, stop=has_called) for seed in range(3)]
    ended = [output for output in outputs if output is not None]
    assert ended
    for output in ended:
        parsed = assemble(parse(output))
        assert (parsed.text, parsed.reasoning) == ("Let me see.", "")
        check_calls(parsed)


@every_format
def test_the_answer_itself_can_be_held_to_rules(tool: str, reasoning: str) -> None:
    allowed = grammar(tool, reasoning, "auto", answer='answer: "yes" | "no"\n')
    walks = walker(tool, reasoning)
    assert walks.accepts(allowed, render_turn(Turn("yes", reasoning="Hm"), tool, reasoning))
    assert walks.accepts(allowed, render_turn(Turn(calls=[("get_time", {})]), tool, reasoning))
    assert not walks.begins(allowed, render_turn(Turn("maybe"), tool, reasoning))


def test_calls_of_tools_that_are_not_strict_take_any_object() -> None:
    loose = Tool("get_weather", WEATHER.parameters)
    auto = grammar_for("hermes", [loose, TIME], tool_choice="auto")
    output = '<tool_call>\n{"name": "get_weather", "arguments": {"anything": 1}}\n</tool_call>'
    assert walker("hermes", "qwen3").accepts(auto, output)
    assert not walker("hermes", "qwen3").accepts(auto, output.replace("get_weather", "get_time"))


def test_an_end_of_a_call_is_known_inside_of_the_text() -> None:
    """The walks above end a turn; here the parser says when the call is over, as the engine will see it."""
    output = render_turn(Turn("Hi.", calls=[("get_weather", FULL)]), "hermes", "qwen3")
    events = feed(parser_for("hermes", "qwen3", list(TOOLS.values())), [output])
    assert events[-1] == CallEnd(0)


@pytest.mark.parametrize(
    ("tool", "parameters", "message"),
    [
        ("qwen3_coder", {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "use 'anyOf', which"),
        ("glm45", {"properties": {"a": {"type": "string", "format": "date"}}}, "'a' of 'f' uses 'format'"),
        ("minimax_m2", {"properties": {}, "required": ["b"]}, "require 'b', which is none of its properties"),
        ("pythonic", {"properties": {"a b": {}}}, "an argument 'a b'"),
    ],
)
def test_schemas_that_a_format_cannot_be_held_to_are_refused(
    tool: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        grammar_for(tool, [Tool("f", parameters)])
    assert refusal.value.field == "tools"
