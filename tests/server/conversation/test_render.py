"""Rendering: tools for templates that print none, and what templates hear of thinking."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.groups import ServerConfig
from quire.server.conversation.formats import Formats, resolve_formats
from quire.server.conversation.render import render, template_variables
from quire.server.conversation.request import NONE, Conversation, TemplateOptions, Tool
from tests.server.scripted import scripted_text

SILENT = scripted_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "c"},
]


def test_a_template_that_knows_no_tools_still_shows_tools_calls_and_results() -> None:
    formats = resolve_formats(SILENT, ServerConfig())
    prompt = render(SILENT, formats, Conversation(messages=HISTORY, tools=(Tool("f"),)))
    assert prompt.startswith("[system]You may call functions")
    assert prompt.endswith(
        '[user]Hi[assistant]<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call>'
        "[user]<tool_response>\nsun\n</tool_response>"
    )
    hidden = render(SILENT, formats, Conversation(messages=HISTORY, tools=(Tool("f"),), tool_choice=NONE))
    assert hidden.startswith("[user]Hi[assistant]<tool_call>")


def test_tools_are_described_to_a_model_that_only_its_template_forgot() -> None:
    """It knows how to call from its training, and its template prints calls."""
    formats = Formats("deepseek_v31", None, template_knows_tools=False, template_knows_calls=True)
    prompt = render(SILENT, formats, Conversation(messages=HISTORY[:1], tools=(Tool("f"),)))
    assert '"name":"f"' in prompt
    assert "<tool_call>" not in prompt


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": False, "reasoning_effort": "high"},
            {"reasoning_effort": "high", "enable_thinking": False, "thinking": False},
        ),
        (
            {"thinking": True, "template": TemplateOptions(chat_template_kwargs={"thinking": 3})},
            {"enable_thinking": True, "thinking": 3},
        ),
    ],
)
def test_what_templates_hear_of_thinking(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert template_variables(Conversation(messages=[], **fields)) == expected
