"""Turns a client's messages, tools and choices into a Conversation."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.parsers.json_scan import parse_object
from quire.server.context import ServerContext
from quire.server.conversation.request import (
    AUTO,
    Conversation,
    Tool,
    ToolChoice,
    check_tools,
)
from quire.server.conversation.template_fields import template_options
from quire.server.openai.chat.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    ConversationFields,
    ToolDefinition,
)
from quire.server.openai.structured import output_format
from quire.server.openai.tool_choice import choice_of_word
from quire.types.errors import RequestError

_TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # field of the text


def conversation_of(context: ServerContext, body: ChatCompletionRequest) -> Conversation:
    """The conversation of a chat request. Copies no schema, so that large ones cost nothing."""
    return dataclasses.replace(
        template_conversation(context, body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output_format=output_format(body.response_format, body.structured_outputs),
    )


def template_conversation(context: ServerContext, body: ConversationFields) -> Conversation:
    """The part of a conversation that its prompt depends on."""
    tools = [tool_of(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    choice, tools = tool_choice_of(body.tool_choice, tools)
    check_tools(tools, choice)
    options = template_options(context.settings, body)
    return Conversation(
        messages=[template_message(message, index) for index, message in enumerate(body.messages)],
        tools=tuple(tools),
        tool_choice=choice,
        reasoning_effort=body.reasoning_effort,
        template=dataclasses.replace(
            options,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        ),
    )


def tool_of(tool: ToolDefinition, where: str) -> Tool:
    if tool.type != "function":
        raise RequestError(
            f"{where} is of type {tool.type[:40]!r}, and this server takes only functions; send type 'function'",
            f"{where}.type",
        )
    function = tool.function
    if function is None:
        raise RequestError(f"{where}.function is missing; give it", f"{where}.function")
    return Tool(function.name, function.description, function.parameters, bool(function.strict), f"{where}.function")


def tool_choice_of(value: str | dict[str, Any] | None, tools: list[Tool]) -> tuple[ToolChoice, list[Tool]]:
    """The tool choice, and the tools that may be called: with `allowed_tools`, some of them."""
    if value is None:
        return AUTO, tools
    if isinstance(value, str):
        return choice_of_word(value), tools
    if value.get("type") == "function":
        return ToolChoice("named", _name_of(value, "tool_choice")), tools
    if value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), tools)
    raise RequestError(
        f"tool_choice is of type {str(value.get('type'))[:40]!r} but must be of type 'function' or 'allowed_tools'",
        "tool_choice.type",
    )


def _allowed(value: Any, tools: list[Tool]) -> tuple[ToolChoice, list[Tool]]:
    where = "tool_choice.allowed_tools"
    listed = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(listed, list) or value.get("mode") not in ("auto", "required"):
        raise RequestError(f"{where} needs a mode, auto or required, and a list of tools", where)
    known = {tool.name: tool for tool in tools}
    allowed: list[Tool] = []
    for index, entry in enumerate(listed):
        name = _name_of(entry, f"{where}.tools[{index}]")
        if name not in known:
            raise RequestError(f"{where}.tools[{index}] names {name[:140]!r}, which is not in tools", where)
        allowed.append(known[name])
    return choice_of_word(value["mode"]), allowed


def _name_of(value: Any, where: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(f"{where}.function.name is missing; give it", f"{where}.function.name")
    return name


def template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message without nulls, its content text or text parts, and its tool calls' arguments as objects."""
    where = f"messages[{index}]"
    result: dict[str, Any] = {"role": message.role}
    content = message.content
    if isinstance(content, list):
        result["content"] = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    else:
        result["content"] = content or message.refusal or ""
    others = message.model_dump(exclude={"role", "content", "refusal", "tool_calls"}, exclude_none=True)
    result.update(others)
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}].function.arguments")
            for i, call in enumerate(message.tool_calls)
        ]
    return result


def last_text(body: ConversationFields) -> str:
    """The text of the last message, if it is the assistant's."""
    last = body.messages[-1]
    if last.role != "assistant":
        return ""
    if isinstance(last.content, list):
        return "\n".join(part if isinstance(part, str) else part.text or part.refusal or "" for part in last.content)
    return last.content or last.refusal or ""


def _text_part(part: ContentPart | str, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.type not in _TEXT_TYPES:
        raise RequestError(
            f"{where} is of type {part.type[:40]!r}, and this server takes only text for now; send type 'text'",
            f"{where}.type",
        )
    field = _TEXT_TYPES[part.type]
    text: str | None = getattr(part, field)
    if text is None:
        raise RequestError(f"{where} has no {field}; give it one", f"{where}.{field}")
    return {"type": "text", "text": text}


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Clients send arguments as JSON in a string; templates print them as objects."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_object(function["arguments"] or "{}")
    except ValueError as error:
        raise RequestError(f"{where} is not a JSON object: {error}; correct it", where) from error
    return {**call, "function": {**function, "arguments": arguments}}
