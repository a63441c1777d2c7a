"""Tools for models whose templates print none: the text that takes their place."""

from __future__ import annotations

from quire.parsers.events import assemble
from quire.parsers.format import Tool as ParserTool
from quire.parsers.stream import make_parser
from quire.server.conversation.plain import with_tools, without_tool_roles
from quire.server.conversation.request import Tool

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "ü\n"}}}


def test_tools_are_listed_in_the_system_message() -> None:
    tools = [Tool("f", "Does f."), Tool("g")]
    user = {"role": "user", "content": "Hi"}
    made = with_tools([user], tools, explain_calls=True)
    assert [message["role"] for message in made] == ["system", "user"]
    assert '"description":"Does f."' in made[0]["content"]
    assert "<tool_call>" in made[0]["content"]
    kept = with_tools([{"role": "system", "content": "Be kind."}, user], tools, explain_calls=False)
    assert kept[0]["content"].startswith("Be kind.\n\n")
    assert "<tool_call>" not in kept[0]["content"]
    parts = with_tools([{"role": "system", "content": [{"type": "text", "text": "Be kind."}]}], tools, False)
    assert parts[0]["content"].startswith("Be kind.\n\n")


def test_calls_become_the_text_that_the_parser_reads() -> None:
    (message,) = without_tool_roles([{"role": "assistant", "content": "Well.", "tool_calls": [CALL]}])
    assert "tool_calls" not in message
    parser = make_parser("hermes", None, prompt_text="", tools=[ParserTool("f")])
    found = assemble([*parser.feed(message["content"]), *parser.finish()])
    assert found.text == "Well."
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"a":"ü\\n"}')]


def test_results_become_the_users_and_neighbours_are_joined() -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": [{"type": "text", "text": "2"}]}]
    made = without_tool_roles(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL]}, *results]
    )
    assert [message["role"] for message in made] == ["user", "assistant", "user"]
    assert made[-1]["content"] == ("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>")
    assert made[0] == {"role": "user", "content": "Hi"}
