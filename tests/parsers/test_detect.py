"""Formats are found by the signs in a template, and the reason is said."""

from __future__ import annotations

from quire.parsers.detect import detect
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS


def test_the_more_signs_the_better() -> None:
    xml = "<tool_call>\n<function=f>\n<parameter=a>"
    assert detect('<tool_call>{"name": "f"}').tool_format == "hermes"
    assert detect(xml + '{"name": ').tool_format == "qwen3_coder"
    assert detect(xml + "<|im_start|>tool_response").tool_format == "step3p5"
    assert detect("[TOOL_CALLS]").tool_format == "mistral_old"
    assert detect("[TOOL_CALLS][ARGS]").tool_format == "mistral"
    assert detect("<think><|im_start|>").reasoning_format == "qwen3"


def test_the_reason_is_said() -> None:
    assert detect("a <think>").why == (
        "tool calls: the chat template shows no known format; "
        "reasoning: deepseek_r1, as the chat template has '<think>'"
    )
    assert detect(None) == (None, None, "there is no chat template")


def test_every_format_can_be_found() -> None:
    for registry, found in ((TOOL_FORMATS, 0), (REASONING_FORMATS, 1)):
        for name in registry:
            assert registry.get(name).signs
            for signs in registry.get(name).signs:
                assert detect(" ".join(signs))[found] == name
