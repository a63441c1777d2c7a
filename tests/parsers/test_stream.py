"""The start comes from the prompt; special tokens are dropped or kept; parts can be switched off."""

from __future__ import annotations

import pytest

from quire.parsers.events import ParsedOutput, assemble
from quire.parsers.format import Tool
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from quire.parsers.stream import make_parser, needs_special_tokens, new_call_id, reasoning_is_open
from quire.types.errors import UnknownNameError
from tests.parsers.helpers import feed

TOOLS = [Tool("f")]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def parse(output: str, tool: str | None, reasoning: str | None, prompt: str = "", **kwargs: object) -> ParsedOutput:
    outputs = {
        assemble(feed(make_parser(tool, reasoning, prompt_text=prompt, tools=TOOLS, **kwargs), pieces))  # type: ignore[arg-type]  # several kinds
        for pieces in ([output], list(output))
    }
    assert len(outputs) == 1
    return outputs.pop()


ASSISTANT = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "output", "reasoning", "text"),
    [
        (ASSISTANT, "<think>\na\n</think>\n\nb", "a", "b"),
        (ASSISTANT, "b", "", "b"),
        (ASSISTANT + "<think>\n", "a\n</think>\n\nb", "a", "b"),
        (ASSISTANT + "<think>\n", "<think>\na\n</think>\n\nb", "a", "b"),
        (ASSISTANT + "<think>\n", "cut short ", "cut short ", ""),
        (ASSISTANT + "<think>\n\n</think>\n\n", "b </think> c", "", "b </think> c"),
        (ASSISTANT + "<think>\n\n</think>\n\n", "\nb", "", "b"),
        (ASSISTANT + "<think>\nI was thin", "king</think>b", "king", "b"),
        (ASSISTANT, "</think>\n\nb", "", "b"),
        (ASSISTANT, "b <think> c </think>", "", "b <think> c </think>"),
        (ASSISTANT, "<think>\n\n</think>\n\nb", "", "b"),
        (ASSISTANT, "<think>a</think>b</think>", "a", "b</think>"),
    ],
)
@pytest.mark.parametrize("special_tokens", [(), ("<|im_start|>", "<|im_end|>")])
def test_thinking_starts_where_the_prompt_says(
    prompt: str, output: str, reasoning: str, text: str, special_tokens: tuple[str, ...]
) -> None:
    assert parse(output, "hermes", "qwen3", prompt, special_tokens=special_tokens) == ParsedOutput(text, reasoning)
    is_open = prompt.endswith(("<think>\n", "thin"))
    assert reasoning_is_open("qwen3", prompt, special_tokens) == is_open


def test_granite_announces_its_thinking_in_words() -> None:
    output = "Here is my thought process: a\nHere is my response: b"
    assert parse(output, None, "granite") == ParsedOutput("b", "a")
    assert parse("<think>a</think><response>b</response>", None, "granite") == ParsedOutput("b", "a")
    assert parse("a <response> b", None, "granite") == ParsedOutput("a <response> b")


def test_calls_inside_of_thinking_are_thoughts() -> None:
    parsed = parse(f"<think>I could {CALL}\n</think>\n\n{CALL}", "hermes", "qwen3")
    assert (parsed.reasoning, parsed.text, len(parsed.calls)) == (f"I could {CALL}", "", 1)


def test_a_token_that_begins_calls_ends_thinking() -> None:
    tokens = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|im_end|>")
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for begin in ("", "<|tool_calls_section_begin|>"):
        parsed = parse(f"<think>Hm.\n{begin}{call}", "kimi_k2", "deepseek_r1", special_tokens=tokens)
        assert (parsed.reasoning, parsed.text, [made.name for made in parsed.calls]) == ("Hm.", "", ["f"])


def test_parts_can_be_switched_off() -> None:
    output = f"<think>a</think>b\n{CALL}"
    assert parse(output, "hermes", "qwen3", parse_tools=False) == ParsedOutput(f"b\n{CALL}", "a")
    only_tools = parse(output, "hermes", "qwen3", parse_reasoning=False)
    assert (only_tools.text, only_tools.reasoning, len(only_tools.calls)) == ("<think>a</think>b", "", 1)
    assert parse(output, None, None) == ParsedOutput(output)
    assert parse(output, "hermes", "qwen3", parse_tools=False, parse_reasoning=False) == ParsedOutput(output)


def test_special_tokens_that_mean_nothing_are_dropped() -> None:
    tokens = ("<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]")
    output = "<s>[THINK]a[INST]b[/THINK]c</s>[TOOL_CALLS]f[ARGS]{}</s>"
    parsed = parse(output, "mistral", "magistral", special_tokens=tokens)
    assert (parsed.text, parsed.reasoning, [call.name for call in parsed.calls]) == ("c", "ab", ["f"])
    assert parse("a</s>", "hermes", "qwen3", special_tokens=tokens).text == "a</s>"


def test_formats_say_whether_they_need_special_tokens() -> None:
    assert {name for name in TOOL_FORMATS if not needs_special_tokens(name, None)} == {
        *("hermes", "qwen3_coder", "pythonic", "glm45", "minimax_m1", "minimax_m2", "step3p5")
    }
    assert {name for name in REASONING_FORMATS if needs_special_tokens(None, name)} == {"magistral", "harmony"}
    assert needs_special_tokens("hermes", "magistral")
    assert needs_special_tokens("hermes", "qwen3", {"<s>", "</think>"})
    assert not needs_special_tokens("hermes", "qwen3", {"<s>", "</s>"})
    assert not needs_special_tokens(None, None)


def test_ids_are_what_templates_accept() -> None:
    assert new_call_id("kimi_k2", "f", 3) == "functions.f:3"
    assert len(new_call_id("mistral", "f", 0)) == 9
    assert new_call_id("mistral_old", "f", 0).isalnum()
    assert new_call_id("hermes", "f", 0).startswith("call_")
    assert new_call_id(None, "f", 0) != new_call_id(None, "f", 0)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown tool call parser 'hermse'; known: deepseek_v3"):
        make_parser("hermse", None, prompt_text="")
    with pytest.raises(UnknownNameError, match="unknown reasoning parser 'none'"):
        make_parser(None, "none", prompt_text="")
