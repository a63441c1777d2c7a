"""Real chat templates are the oracle: what they write for a turn is parsed back to the same turn.

A template that leaves something out (text beside calls, thinking, a second call) is not asked for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.chat_template import ChatTemplate
from quire.parsers.detect import detect
from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tests.parsers.template_oracle import (
    NAMES,
    USER,
    VARIABLE,
    Cut,
    cut_turn,
    parse,
    templates_folder,
    tool_schemas,
)

pytestmark = pytest.mark.skipif(templates_folder() is None, reason=f"{VARIABLE} names no folder of chat templates")

ARGUMENTS = {
    "city": 'Zürich "<b>" 東京\nline </tool_call>',
    "days": 3,
    "scale": 0.5,
    "detailed": True,
    "options": {"a": [1, {"b": None}], "c": "</tool_call></parameter></arg_value>"},
    "tags": ["x", "y"],
}


@dataclass(frozen=True)
class Case:
    """A template, the formats it speaks, and what it can write."""

    template: str
    tool: str | None
    reasoning: str | None = None
    text: bool = True  # beside calls
    thinks: bool | None = None  # by default, if there is a reasoning format
    calls: int = 2
    string_arguments: bool = False
    no_content: Any = ""
    shows_tools: bool = True
    thinking_part: bool = False  # thinking is a part of the content
    thinking_key: str = "reasoning_content"
    arguments: dict[str, Any] = field(default_factory=lambda: ARGUMENTS)
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def shows_thinking(self) -> bool:
        return self.reasoning is not None if self.thinks is None else self.thinks


CASES = [
    Case("Qwen-Qwen2.5-7B-Instruct", "hermes"),
    Case("Qwen-Qwen3-0.6B", "hermes", "qwen3"),
    Case("Qwen-Qwen3-0.6B", "hermes", "qwen3", kwargs={"enable_thinking": False}),
    Case("Qwen-QwQ-32B", "hermes", "qwen3", thinks=False),
    Case("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", text=False),
    Case("ibm-granite-granite-4.0", "hermes"),
    Case("MiMo-VL", "hermes"),
    Case("Qwen3-Coder", "qwen3_coder"),
    Case("Qwen3.5-4B", "qwen3_coder", "qwen3"),
    Case("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder", "qwen3"),
    Case("meta-llama-Llama-3.1-8B-Instruct", "llama3_json", text=False, calls=1),
    Case("meta-llama-Llama-3.2-3B-Instruct", "llama3_json", text=False, calls=1),
    Case("meta-llama-Llama-3.3-70B-Instruct", "llama3_json", text=False, calls=1),
    Case("Mistral-Small-3.2-24B-Instruct-2506", "mistral", text=False),
    Case("unsloth-mistral-Devstral-Small-2507", "mistral"),
    Case("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "magistral", thinking_part=True),
    Case("mistralai-Mistral-Nemo-Instruct-2407", "mistral_old", text=False),
    Case(
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        *("deepseek_v3", "deepseek_r1"),
        text=False,
        thinks=False,
        string_arguments=True,
        no_content=None,
    ),
    Case("llama-cpp-deepseek-r1", "deepseek_v3", "deepseek_r1", text=False, thinks=False, shows_tools=False),
    Case("deepseek-ai-DeepSeek-V3.1", "deepseek_v31", "deepseek_r1", thinks=False),
    Case("deepseek-ai-DeepSeek-V3.2", "deepseek_v32", "deepseek_r1", kwargs={"thinking": True}),
    Case("deepseek-ai-DeepSeek-V4", "deepseek_v4", "deepseek_r1", kwargs={"enable_thinking": True, "thinking": True}),
    Case("GLM-4.6", "glm45", "glm45"),
    Case("GLM-4.6", "glm45", "glm45", thinks=False, kwargs={"enable_thinking": False}),
    Case("GLM-4.7-Flash", "glm45", "glm45"),
    Case("poolside-Laguna-S-2.1", "glm45", "deepseek_r1"),
    Case("moonshotai-Kimi-K2", "kimi_k2"),
    # It writes strings between quotes and escapes nothing in them.
    Case(
        "LFM2.5-8B-A1B", "pythonic", "qwen3", thinking_key="thinking", arguments={**ARGUMENTS, "city": "Zürich <b>"}
    ),
    Case("fireworks-ai-llama-3-firefunction-v2", "phi4_mini", kwargs={"functions": "[]", "datetime": "today"}),
    Case("MiniMax-M1", "minimax_m1", text=False),
    Case("MiniMax-M2", "minimax_m2", "minimax_m2"),
    Case("StepFun3.5-Flash", "step3p5", "step3p5"),
]

# Proved by their templates otherwise, or not at all: docs/guides/tool-calling.md says so of each.
PROVED_ELSEWHERE = {"harmony"}
UNPROVED_TOOLS = {"llama4_pythonic", "granite"}
UNPROVED_REASONING = {"granite"}


def proved() -> tuple[set[str], set[str]]:
    """The names of the tool and of the reasoning formats that a template proves."""
    tools = {case.tool for case in CASES if case.tool is not None}
    reasoning = {case.reasoning for case in CASES if case.reasoning is not None and case.shows_thinking}
    return tools | PROVED_ELSEWHERE, reasoning | PROVED_ELSEWHERE


def source(name: str) -> str:
    folder = templates_folder()
    assert folder is not None
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def name_of(case: Case) -> str:
    return "-".join([case.template, *map(str, case.kwargs.values())])


def turn_of(case: Case, num_calls: int, text: str, thinking: str) -> Cut:
    calls = [("get_weather", case.arguments), ("get_time", {})][:num_calls]
    message: dict[str, Any] = {"content": text or case.no_content}
    if thinking and case.thinking_part:
        message["content"] = [{"type": "thinking", "thinking": thinking}]
        message["content"] += [{"type": "text", "text": text}] if text else []
    elif thinking:
        message[case.thinking_key] = thinking
    if calls:
        message["tool_calls"] = [
            {
                "id": f"abcdefgh{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments, ensure_ascii=False) if case.string_arguments else arguments,
                },
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return cut_turn(source(case.template), message, with_tools=case.shows_tools, kwargs=case.kwargs)


@pytest.mark.parametrize("case", [case for case in CASES if case.tool is not None], ids=name_of)
def test_calls_come_back(case: Case) -> None:
    for num_calls in range(1, case.calls + 1):
        for text in ("", "Let me see.")[: 1 + case.text]:
            for thinking in ("", "Hm.\n\nSo.")[: 1 + case.shows_thinking]:
                cut = turn_of(case, num_calls, text, thinking)
                parsed = parse(cut, case.tool, case.reasoning)
                assert (parsed.text, parsed.reasoning) == (text, thinking)
                wanted = [("get_weather", case.arguments), ("get_time", {})][:num_calls]
                assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == wanted
                assert all(call.complete for call in parsed.calls)
                assert parse(cut, case.tool, case.reasoning, pieces=0) == parsed


@pytest.mark.parametrize("case", [case for case in CASES if case.shows_thinking], ids=name_of)
def test_thinking_comes_back(case: Case) -> None:
    cut = turn_of(case, 0, "The answer.", "Hm.\n\nSo.")
    parsed = parse(cut, case.tool, case.reasoning)
    assert (parsed.text, parsed.reasoning, parsed.calls) == ("The answer.", "Hm.\n\nSo.", ())
    cut_short = parse(Cut(cut.prompt, cut.output[: cut.output.index("So.") + 2]), case.tool, case.reasoning)
    assert (cut_short.text, cut_short.reasoning) == ("", "Hm.\n\nSo")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_plain_answer_comes_back(case: Case) -> None:
    cut = turn_of(case, 0, "The <b>answer</b>.", "")
    assert parse(cut, case.tool, case.reasoning).text == "The <b>answer</b>."


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_templates_are_recognized(case: Case) -> None:
    found = detect(source(case.template))
    assert (found.tool_format, found.reasoning_format) == (case.tool, case.reasoning)


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("openai-gpt-oss-120b", "harmony", "harmony"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite", "granite"),
        ("Kimi-K2-Thinking", "kimi_k2", "deepseek_r1"),
        ("google-gemma-2-2b-it", None, None),
        ("CohereForAI-c4ai-command-r-plus-tool_use", None, None),
        ("MiniMax-M3", None, None),
        ("microsoft-Phi-3.5-mini-instruct", None, None),
    ],
)
def test_other_templates_are_recognized_or_left_alone(template: str, tool: str | None, reasoning: str | None) -> None:
    found = detect(source(template))
    assert (found.tool_format, found.reasoning_format) == (tool, reasoning)


def test_granite_is_told_to_write_its_formats() -> None:
    """Its template prints no calls and no thinking, but tells the model how to."""
    template = ChatTemplate(source("ibm-granite-granite-3.3-2B-Instruct"), NAMES)
    tool, reasoning = TOOL_FORMATS.get("granite"), REASONING_FORMATS.get("granite")
    assert isinstance(tool, ToolFormat)
    assert isinstance(reasoning, ReasoningFormat)
    with_tools = template.render([USER], tools=tool_schemas())
    assert f"{tool.begin[0]} followed by a JSON list" in with_tools
    assert tool.opening == "["
    thinks = template.render([USER], thinking=True)
    assert f"between {reasoning.begin[0]}{reasoning.end[0]}" in thinks
    assert f"between {''.join(reasoning.answer)}" in thinks


def test_kimi_names_its_calls_by_id() -> None:
    case = next(case for case in CASES if case.tool == "kimi_k2")
    parsed = parse(turn_of(case, 2, "", ""), "kimi_k2", None)
    assert [call.id for call in parsed.calls] == ["functions.get_weather:0", "functions.get_time:1"]


def test_mistral_small_passes_its_ids_on() -> None:
    case = next(case for case in CASES if case.template.startswith("Mistral-Small"))
    parsed = parse(turn_of(case, 2, "", ""), "mistral", None)
    assert [call.id for call in parsed.calls] == ["abcdefgh0", "abcdefgh1"]


def harmony_turn(message: dict[str, Any]) -> Cut:
    return cut_turn(source("openai-gpt-oss-120b"), message)


def test_harmony_calls_come_back() -> None:
    function = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    for thinking in ("", "Hm.\n\nSo."):
        message: dict[str, Any] = {"tool_calls": [function], "content": ""}
        cut = harmony_turn({**message, "thinking": thinking} if thinking else message)
        parsed = parse(cut, "harmony", "harmony")
        assert (parsed.text, parsed.reasoning) == ("", thinking)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("get_weather", ARGUMENTS)]


def test_harmony_answers_come_back() -> None:
    parsed = parse(harmony_turn({"content": "The answer.", "thinking": "Hm.\n\nSo."}), "harmony", "harmony")
    assert (parsed.text, parsed.reasoning, parsed.calls) == ("The answer.", "Hm.\n\nSo.", ())


def test_every_template_in_the_folder_is_read_without_an_error() -> None:
    folder = templates_folder()
    assert folder is not None
    found = {path.stem: detect(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.jinja"))}
    assert all(result.why for result in found.values())
    assert sum(result.tool_format is not None for result in found.values()) >= 30
