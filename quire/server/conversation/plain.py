"""Writes tools, calls and results into the text of messages, for a model whose chat template prints none of them.

The form is the one of the format `hermes`, in which the answer is then read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.server.conversation.request import Tool

_OFFER = """You may call functions to help with the user's request. The functions, as JSON:
<tools>
{tools}
</tools>"""

_HOW_TO_CALL = """
For each call, answer with a JSON object that has the function's name and its arguments, within these tags:
<tool_call>
{"name": <function name>, "arguments": <arguments as an object>}
</tool_call>"""

Message = Mapping[str, Any]


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], explain_calls: bool) -> list[Message]:
    """The conversation with `tools` in its system message, and how to call them unless the model knows that."""
    listed = "\n".join(_json(tool.as_function()) for tool in tools)
    offer = _OFFER.format(tools=listed) + (_HOW_TO_CALL if explain_calls else "")
    if messages and messages[0].get("role") in ("system", "developer"):
        first = messages[0]
        text = "\n\n".join(filter(None, (_text(first.get("content")), offer)))
        return [{**first, "content": text}, *messages[1:]]
    return [{"role": "system", "content": offer}, *messages]


def without_tool_roles(messages: Sequence[Message]) -> list[Message]:
    """The conversation with calls and results as text. Results become the user's: most templates know no other."""
    rewritten: list[Message] = []
    in_results = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            response = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if in_results:
                # Templates that want user and assistant to take turns refuse two of the same.
                response = f"{rewritten.pop()['content']}\n{response}"
            rewritten.append({"role": "user", "content": response})
        elif message.get("tool_calls"):
            rewritten.append(_with_calls_as_text(message))
        else:
            rewritten.append(message)
        in_results = is_result
    return rewritten


def _with_calls_as_text(message: Message) -> Message:
    calls = [call.get("function", call) for call in message["tool_calls"]]
    written = [
        f"<tool_call>\n{_json({'name': call.get('name'), 'arguments': call.get('arguments')})}\n</tool_call>"
        for call in calls
    ]
    text = "\n".join(filter(None, (_text(message.get("content")), *written)))
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": text}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part["text"] for part in content)
    return content or ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
