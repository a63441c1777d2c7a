"""Which formats are chosen, and that the log says so."""

from __future__ import annotations

import logging

import pytest

from quire.config.groups import ServerConfig
from quire.frontend.text_model import TextModel
from quire.server.conversation.formats import resolve_formats
from quire.types.errors import UnknownNameError
from tests.server.scripted import TEMPLATE, scripted_text

QWEN = (
    '{% if tools %}<tool_call>\n{"name": <function-name>{% endif %}<|im_start|>{{ messages }}'
    "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
)
SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_auto_looks_at_the_template_and_says_what_it_saw(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire"):
        formats = resolve_formats(scripted_text(QWEN), ServerConfig())
    assert (formats.tool, formats.reasoning, formats.template_knows_tools) == ("hermes", "qwen3", True)
    assert "tool calls are read as hermes, thinking as qwen3" in caplog.text
    assert "<tool_call>" in caplog.text


def test_names_and_none_override() -> None:
    formats = resolve_formats(scripted_text(QWEN), ServerConfig(tool_call_parser="mistral", reasoning_parser="none"))
    assert (formats.tool, formats.reasoning) == ("mistral", None)


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_refused_with_the_known_ones(setting: str) -> None:
    with pytest.raises(UnknownNameError, match=r"hermy.*harmony"):
        resolve_formats(scripted_text(QWEN), ServerConfig(**{setting: "hermy"}))


def test_a_template_that_knows_no_tools_gets_them_in_text() -> None:
    formats = resolve_formats(scripted_text(SILENT), ServerConfig())
    assert (formats.tool, formats.template_knows_tools, formats.template_knows_calls) == ("hermes", False, False)
    formats = resolve_formats(scripted_text(TEMPLATE), ServerConfig())
    assert (formats.tool, formats.template_knows_tools, formats.template_knows_calls) == (None, True, True)


def test_without_a_template_or_with_a_broken_one_there_is_nothing_to_read(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_formats(TextModel(None), ServerConfig()).tool is None
    formats = resolve_formats(scripted_text("{% for"), ServerConfig())
    assert (formats.tool, formats.reasoning) == (None, None)
    assert "not valid Jinja" in caplog.text


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    formats = resolve_formats(scripted_text(), ServerConfig())
    assert {"[TOOL_CALLS]", "<|channel|>", "</s>"} <= formats.special_tokens.keys()
