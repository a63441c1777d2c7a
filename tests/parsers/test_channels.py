"""Harmony: channels and recipients decide what is seen, thought and called."""

from __future__ import annotations

from typing import Any

import pytest

from quire.parsers.events import CallArguments, ParsedCall, ParsedOutput, ReasoningDelta, TextDelta, assemble
from quire.parsers.format import Tool
from quire.parsers.stream import make_parser
from tests.parsers.helpers import HARMONY_PROMPT, feed

TOOLS = [Tool("f"), Tool("lookup")]
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def parse(output: str, prompt: str = HARMONY_PROMPT, **kwargs: Any) -> ParsedOutput:
    results = [
        assemble(feed(make_parser("harmony", "harmony", prompt_text=prompt, tools=TOOLS, **kwargs), pieces))
        for pieces in ([output], list(output))
    ]
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("<|channel|>final<|message|>Yes.<|return|>", ParsedOutput("Yes.")),
        ("<|channel|>final<|message|>Yes.", ParsedOutput("Yes.")),
        (ANALYSIS + "<|channel|>final<|message|>Yes.", ParsedOutput("Yes.", "Hm.")),
        ("<|channel|>analysis<|message|>cut sho", ParsedOutput("", "cut sho")),
        ("<|channel|>commentary<|message|>I will look.<|end|>", ParsedOutput("I will look.")),
        ("<|message|>No channel.", ParsedOutput("No channel.")),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ParsedOutput("", "1 + 1")),
        ("<|channel|>commentary to=browser.search <|message|>{}<|call|>", ParsedOutput("", "{}")),
    ],
)
def test_channels_tell_thoughts_from_text(output: str, wanted: ParsedOutput) -> None:
    assert parse(output) == wanted


@pytest.mark.parametrize(
    "head",
    [
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f<|message|>",
        "<|channel|>commentary to=f<|message|>",
    ],
)
def test_recipients_make_calls_wherever_the_header_names_them(head: str) -> None:
    for end in ("<|call|>", ""):
        parsed = parse(f'{ANALYSIS}{head}{{"a": "<|end|>"}}{end}')
        assert parsed == ParsedOutput("", "Hm.", (ParsedCall("f", '{"a": "<|end|>"}'),))


def test_a_preamble_is_seen_and_several_calls_count_on() -> None:
    output = (
        "<|channel|>commentary<|message|>Two things.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
        '<|message|>{"a": 1}<|call|><|start|>assistant to=functions.lookup<|channel|>commentary<|message|>{}<|call|>'
    )
    calls = (ParsedCall("f", '{"a": 1}'), ParsedCall("lookup", "{}"))
    assert parse(output) == ParsedOutput("Two things.", "", calls)


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        ("Hello there", "Hello there", []),
        ("<|channel|>final", "<|channel|>final", []),
        (" to=functions.f<|channel|>commentary<|message|>not JSON<|call|>", "not JSON", []),
        (' to=functions.f<|channel|>commentary<|message|>{"a": ?}<|call|>', "?}", [("f", '{"a": ', False)]),
        (' to=functions.f<|channel|>commentary<|message|>{"a": "b', "", [("f", '{"a": "b', False)]),
        (" to=functions.f<|channel|>commentary<|message|>{} so<|call|>", " so", [("f", "{}", True)]),
        (" to=functions.f<|channel|>commentary<|message|><|call|>", "", [("f", "{}", True)]),
        (" to=functions.f<|channel|>commentary<|message|>", "", [("f", "", False)]),
        ("<|channel|>final<|message|>a<|end|>b", "ab", []),
        ("<|channel|>final<|message|>a<|end|><|channel|>final<|message|>b", "ab", []),
        ("<|end|><|start|>assistant<|channel|>final<|message|>b", "b", []),
    ],
)
def test_what_is_out_of_step_is_not_lost(output: str, text: str, calls: list[tuple[str, str, bool]]) -> None:
    parsed = parse(output)
    assert parsed.text == text
    assert [(call.name, call.arguments, call.complete) for call in parsed.calls] == calls


def test_the_prompt_says_where_the_output_goes_on() -> None:
    assert parse("king.<|end|>", HARMONY_PROMPT + "<|channel|>analysis<|message|>Thin").reasoning == "king."
    assert parse("<|message|>Yes.", HARMONY_PROMPT + "<|channel|>final").text == "Yes."
    assert parse("<|start|>assistant<|channel|>final<|message|>Yes.", "").text == "Yes."


def test_everything_streams() -> None:
    parser = make_parser("harmony", "harmony", prompt_text=HARMONY_PROMPT, tools=TOOLS)
    parser.feed("<|channel|>analysis<|message|>")
    assert parser.feed("Hm, ") == [ReasoningDelta("Hm, ")]
    parser.feed("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>")
    parser.feed('{"a"')
    assert parser.feed(': "x') == [CallArguments(0, ': "x')]
    parser.feed('"}<|call|><|start|>assistant<|channel|>final<|message|>')
    assert parser.feed("Yes") == [TextDelta("Yes")]


def test_parts_can_be_switched_off() -> None:
    output = f"{ANALYSIS} to=functions.f<|channel|>commentary<|message|>{{}}<|call|>"
    assert parse(output, parse_tools=False) == ParsedOutput("{}", "Hm.")
    assert parse(output, parse_reasoning=False) == ParsedOutput("Hm.", "", (ParsedCall("f", "{}"),))


def test_other_special_tokens_are_dropped() -> None:
    tokens = ("<|endoftext|>", "<|end|>", "<|channel|>", "<|message|>")
    assert parse("<|channel|>final<|message|>a<|endoftext|>b", special_tokens=tokens).text == "ab"
