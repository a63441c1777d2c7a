"""Conversations: which tools the model hears of, and what is refused about them."""

from __future__ import annotations

import pytest

from quire.server.conversation.request import AUTO, NONE, REQUIRED, Conversation, Tool, ToolChoice, check_tools
from quire.types.errors import RequestError


def test_a_tool_without_parameters_takes_an_object() -> None:
    assert Tool("f").as_function() == {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }


def test_nobody_hears_of_tools_that_may_not_be_called() -> None:
    tools = (Tool("f"),)
    assert Conversation(messages=[], tools=tools).offered_tools == tools
    assert Conversation(messages=[], tools=tools, tool_choice=NONE).offered_tools == ()


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([Tool("", where="tools[0]")], AUTO, "tools[0]"),
        ([Tool("a\n", where="tools[0]")], AUTO, "tools[0]"),
        ([Tool("a", where="tools[0]"), Tool("a", where="tools[1]")], AUTO, "tools[1]"),
        ([Tool("a", parameters={"type": ["object", "null"]}, where="tools[0]")], AUTO, "tools[0]"),
        ([], REQUIRED, "choice"),
        ([Tool("a")], ToolChoice("named", "b"), "choice"),
    ],
)
def test_what_is_refused(tools: list[Tool], choice: ToolChoice, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_tools(tools, choice, "choice")
    assert refused.value.field == field


def test_names_that_other_interfaces_allow_are_allowed() -> None:
    check_tools([Tool("mcp__server-1.list_files"), Tool("x" * 128)], REQUIRED)
