"""For every format: what a model says comes back, however it is cut; what is no call stays text."""

from __future__ import annotations

import json

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, TextDelta, assemble, joined
from quire.parsers.format import ReasoningFormat, Tool
from quire.parsers.generate import render_turn
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from quire.parsers.stream import make_parser
from tests.parsers.helpers import (
    NAMES,
    PAIRS,
    SEEDS,
    cuts,
    feed,
    markers,
    parser_for,
    plain_texts,
    raw_text,
    tools_for,
    turns,
    with_markers,
)

# Of each of so many outputs in each of 16 formats, SPLITS ways to cut it: 3,200 in CI and 102,400 at night.
EXAMPLES = 20
FEWER_EXAMPLES = 10
NIGHTLY_EXAMPLES = 640
SPLITS = 10
TOOLS = [Tool(name) for name in NAMES]

every_format = pytest.mark.parametrize(("tool", "reasoning"), PAIRS)


def test_every_format_is_tested() -> None:
    assert {tool for tool, _ in PAIRS} == set(TOOL_FORMATS)
    assert {reasoning for _, reasoning in PAIRS} == set(REASONING_FORMATS)


def check_arguments(events: list[Event]) -> None:
    """Fragments are prefixes of JSON all the way, and JSON objects where they are said to be complete."""
    so_far: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(so_far)
            so_far[event.index] = ""
        elif isinstance(event, CallArguments):
            so_far[event.index] += event.json_fragment
            pydantic_core.from_json(so_far[event.index], allow_partial="trailing-strings")
        elif isinstance(event, CallEnd) and event.complete:
            assert isinstance(json.loads(so_far[event.index]), dict)
    assert [event.index for event in events if isinstance(event, CallEnd)] == list(so_far)


def check_round_trip(tool: str, reasoning: str, data: st.DataObject) -> None:
    turn = data.draw(turns(tool, reasoning))
    is_open = data.draw(st.booleans()) and isinstance(REASONING_FORMATS.get(reasoning), ReasoningFormat)
    output = render_turn(turn, tool, reasoning, is_open)
    for pieces in cuts(output, data.draw(SEEDS), 2):
        events = feed(parser_for(tool, reasoning, tools_for(turn), is_open), pieces)
        parsed = assemble(events)
        assert (parsed.text, parsed.reasoning) == (turn.text, turn.reasoning)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
            (name, dict(arguments)) for name, arguments in turn.calls
        ]
        check_arguments(events)


def check_cuts(tool: str, reasoning: str, data: st.DataObject) -> None:
    """Turns with something wrong in them: cut short, glued together, mixed with markers."""
    turn = data.draw(turns(tool, reasoning))
    output = render_turn(turn, tool, reasoning) + data.draw(with_markers(markers(tool, reasoning)))
    at = data.draw(st.integers(0, len(output)))
    if data.draw(st.booleans()):
        output = output[:at] + data.draw(with_markers(markers(tool, reasoning))) + output[at:]
    else:
        output = output[:at]
    is_open = data.draw(st.booleans())
    tools = tools_for(turn)
    whole = feed(parser_for(tool, reasoning, tools, is_open), [output])
    for pieces in cuts(output, data.draw(SEEDS), SPLITS):
        events = feed(parser_for(tool, reasoning, tools, is_open), pieces)
        assert joined(events) == joined(whole)
    check_arguments(events)


@every_format
@settings(max_examples=FEWER_EXAMPLES, deadline=None)
@given(data=st.data())
def test_what_is_said_comes_back(tool: str, reasoning: str, data: st.DataObject) -> None:
    check_round_trip(tool, reasoning, data)


@every_format
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_the_cuts_do_not_matter(tool: str, reasoning: str, data: st.DataObject) -> None:
    check_cuts(tool, reasoning, data)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@every_format
@settings(max_examples=NIGHTLY_EXAMPLES, deadline=None)
@given(data=st.data())
def test_many_turns_come_back(tool: str, reasoning: str, data: st.DataObject) -> None:
    check_round_trip(tool, reasoning, data)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@every_format
@settings(max_examples=NIGHTLY_EXAMPLES, deadline=None)
@given(data=st.data())
def test_many_cuts_do_not_matter(tool: str, reasoning: str, data: st.DataObject) -> None:
    check_cuts(tool, reasoning, data)


@every_format
@settings(max_examples=FEWER_EXAMPLES, deadline=None)
@given(data=st.data())
def test_text_without_markers_is_never_changed(tool: str, reasoning: str, data: st.DataObject) -> None:
    if tool == "harmony":
        return  # its text has a header, which is the subject of test_channels.py
    text = data.draw(plain_texts(tool, reasoning))
    for pieces in cuts(text, data.draw(SEEDS), 3):
        assert raw_text(feed(parser_for(tool, reasoning, TOOLS), pieces)) == text


def dsml_call(is_string: str) -> str:
    """A call of f with a = 1, without the section around it."""
    bar = "\uff5c"
    tag = f"{bar}DSML{bar}"
    return f'<{tag}invoke name="f">\n<{tag}parameter name="a" string="{is_string}">1</{tag}parameter>\n</{tag}invoke>'


# What models get wrong, and what becomes of it: text, and calls.
MALFORMED = [
    ("hermes", "Hm <tool_call> is a tag.", "Hm <tool_call> is a tag.", []),
    ("hermes", "<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>!', '<tool_call>{"nam": 1}</tool_call>!', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru?}}', "?}}", [("f", '{"a": tru', False)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b', False)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_ca', "", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} so', "so", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": ?', ', "x": ?', [("f", "{}", True)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}', True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}', True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', "", [("f", '{"a": "x\\ny"}', True)]),
    (
        "hermes",
        '<tool_call>x</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>x</tool_call>",
        [("f", "{}", True)],
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", "", [("f", '{"a": "x"}', True)]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx", "", [("f", '{"a": "x', False)]),
    ("qwen3_coder", "<tool_call>\n<function=f>\nsome words", "<tool_call>\n<function=f>\nsome words", []),
    ("qwen3_coder", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", 'See:\n{"name": "f", "parameters": {}}', "See:", [("f", "{}", True)]),
    ("llama3_json", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=g())]", "[f(a=g())]", []),
    ("pythonic", "[f(a={1, 2})]", "[f(a={1, 2})]", []),
    (
        "pythonic",
        "[f(a='it\\'s', b=(1, True, None), c=-2.5)]",
        "",
        [("f", '{"a": "it\'s", "b": [1, true, null], "c": -2.5}', True)],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}', True)]),
    ("mistral", "[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    ("mistral_old", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, oops]', ", oops]", [("f", "{}", True)]),
    ("mistral_old", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("glm45", "<tool_call>f\n</tool_call>", "", [("f", "{}", True)]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [("f", '{"a": 1}', True)]),
    (
        "kimi_k2",
        '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        "",
        [("f", '{"a": 1}', True)],
    ),
    ("deepseek_v32", dsml_call("true"), "", [("f", '{"a": "1"}', True)]),
    ("deepseek_v32", dsml_call("false"), "", [("f", '{"a": 1}', True)]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n</invoke>', "", [("f", "{}", True)]),
]


@pytest.mark.parametrize(("tool", "output", "text", "calls"), MALFORMED)
def test_what_is_wrong_stays_text(tool: str, output: str, text: str, calls: list[tuple[str, str, bool]]) -> None:
    tools = [Tool("f", {"properties": {"a": {"type": ["string", "integer"]}}})]
    for pieces in ([output], list(output)):
        parsed = assemble(feed(make_parser(tool, None, prompt_text="", tools=tools), pieces))
        assert parsed.text == text
        assert [(call.name, call.arguments, call.complete) for call in parsed.calls] == calls


def test_one_line_in_the_log_says_so_and_nothing_of_the_text(caplog: pytest.LogCaptureFixture) -> None:
    feed(make_parser("hermes", None, prompt_text="", tools=TOOLS), ["<tool_call>secret"] * 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "malformed" in caplog.text
    assert "secret" not in caplog.text


def test_what_is_surely_text_is_not_held_back() -> None:
    parser = make_parser("hermes", "qwen3", prompt_text="", tools=TOOLS)
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" there <") == [TextDelta(" there")]
    assert parser.feed("b") == [TextDelta(" <b")]
    assert parser.feed("> a <tool") == [TextDelta("> a")]
    assert parser.feed("s") == [TextDelta(" <tools")]


@pytest.mark.parametrize(
    ("tool", "before"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": '),
        ("llama3_json", '{"name": "f", "parameters": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral_old", '[TOOL_CALLS][{"name": "f", "arguments": '),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"),
    ],
)
def test_arguments_are_passed_on_while_they_come(tool: str, before: str) -> None:
    parser = make_parser(tool, None, prompt_text="", tools=TOOLS)
    assert [event for event in parser.feed(before) if isinstance(event, CallArguments)] == []
    said = []
    for piece in ('{"ci', 'ty": "P', "ar", 'is", "n": 1', "2}"):
        said.append("".join(e.json_fragment for e in parser.feed(piece) if isinstance(e, CallArguments)))
    assert said == ['{"ci', 'ty": "P', "ar", 'is", "n": 1', "2}"]


def test_string_arguments_in_tags_are_passed_on_while_they_come() -> None:
    tools = [Tool("f", {"properties": {"a": {"type": "string"}}})]
    parser = make_parser("qwen3_coder", None, prompt_text="", tools=tools)
    parser.feed("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert parser.feed("one\ntwo") == [CallArguments(0, "one\\ntwo")]
    assert parser.feed("\n</par") == []
    assert parser.feed("ty>") == [CallArguments(0, "\\n</party>")]


def test_whitespace_around_calls_is_no_text_but_between_texts_it_is() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for output, text in (
        (f"\n\n{call}\n", ""),
        (f"a\n\n{call}\n{call}\n", "a"),
        (f"a\n{call}\n\nb\n", "a\n\nb"),
        (f"{call}\n\nb", "b"),
        (" a \n", " a \n"),
    ):
        assert assemble(feed(make_parser("hermes", None, prompt_text="", tools=TOOLS), [output])).text == text


def test_whitespace_after_a_call_is_no_text_in_whatever_piece_it_comes() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for pieces in ([call, "\n b"], [call, "\n", " b"], [call, "\n ", "b"], [call + "\n b"]):
        assert assemble(feed(make_parser("hermes", None, prompt_text="", tools=TOOLS), pieces)).text == "b"
