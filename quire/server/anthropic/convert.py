"""Turns a Messages request into a Conversation, or says which part of it this server cannot take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.server.anthropic.protocol import (
    FormatField,
    InputBlock,
    InputMessage,
    MessagesRequest,
    PromptFields,
    ToolDefinition,
)
from quire.server.context import ServerContext
from quire.server.conversation.request import (
    AUTO,
    NONE,
    REQUIRED,
    Conversation,
    OutputFormat,
    Tool,
    ToolChoice,
    check_tools,
    text_of,
)
from quire.server.conversation.template_fields import template_options
from quire.server.generation.structured import one_format
from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams

_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
_THINKING = {"enabled": True, "disabled": False, "adaptive": None}
_ROLES = ("user", "assistant", "system")


def conversation_of(context: ServerContext, body: PromptFields) -> Conversation:
    messages = _system(body.system)
    for index, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages[{index}]")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    choice, parallel = _tool_choice(body)
    check_tools(tools, choice)
    config = body.output_config
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        output_format=_one_format(body),
        thinking=_thinking(body),
        reasoning_effort=None if config is None else config.effort,
        # An assistant's message at the end is the beginning of the answer.
        template=dataclasses.replace(
            template_options(context.settings, body), continue_final_message=messages[-1]["role"] == "assistant"
        ),
    )


def _system(system: str | list[InputBlock] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else _texts(system, "system")
    return [{"role": "system", "content": text}]


def _messages_of(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """One of Anthropic's messages as messages for the template: each tool result is a message of its own."""
    if message.role not in _ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:40]!r} but must be one of {', '.join(_ROLES)}", f"{where}.role"
        )
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, f"{where}.content")]
    if message.role == "system":
        return [{"role": "system", "content": _texts(message.content, f"{where}.content")}]
    return _user(message.content, f"{where}.content")


def _user(blocks: Sequence[InputBlock], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type == "tool_result":
            result = {"role": "tool", "tool_call_id": text_of(block.others, "tool_use_id", place)}
            text = _result_text(block, place)
            failed = block.others.get("is_error") is True
            messages.append(result | {"content": f"Error: {text}" if failed else text})
        else:
            texts.append(_text(block, place))
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _assistant(blocks: Sequence[InputBlock], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type == "thinking":
            thinking.append(text_of(block.others, "thinking", place))
        elif block.type == "tool_use":
            arguments = block.others.get("input")
            if not isinstance(arguments, dict):
                raise RequestError(f"{place}.input must be an object", f"{place}.input")
            function = {"name": text_of(block.others, "name", place), "arguments": arguments}
            calls.append({"id": text_of(block.others, "id", place), "type": "function", "function": function})
        elif block.type != "redacted_thinking":  # its content is encrypted
            texts.append(_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _result_text(block: InputBlock, where: str) -> str:
    content = block.others.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        raise RequestError(f"{where}.content must be text or a list of blocks", f"{where}.content")
    return _texts([InputBlock.model_validate(part) for part in content], f"{where}.content")


def _texts(blocks: Sequence[InputBlock], where: str) -> str:
    return "\n".join(_text(block, f"{where}[{index}]") for index, block in enumerate(blocks))


def _text(block: InputBlock, where: str) -> str:
    """The text of a block; a document may be one."""
    if block.type == "text":
        return text_of(block.others, "text", where)
    source = block.others.get("source")
    if block.type == "document" and isinstance(source, dict) and source.get("type") == "text":
        data = source.get("data")
        if isinstance(data, str):
            return data
    raise RequestError(
        f"{where} is of type {block.type[:40]!r}, which this server does not take here; send blocks of type 'text'",
        f"{where}.type",
    )


def _tool(tool: ToolDefinition, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {tool.type[:60]!r}, which this server does not run; give tools of your own, with an"
            " input_schema",
            f"{where}.type",
        )
    for name, value in (("name", tool.name), ("input_schema", tool.input_schema)):
        if value is None:
            raise RequestError(f"{where}.{name} is missing; give it", f"{where}.{name}")
    assert tool.name is not None
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), where)


def _tool_choice(body: PromptFields) -> tuple[ToolChoice, bool]:
    """The tool choice, and whether an answer may have several calls."""
    choice = body.tool_choice
    if choice is None:
        return AUTO, True
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name is missing; give it", "tool_choice.name")
        return ToolChoice("named", choice.name), parallel
    if choice.type not in _CHOICES:
        raise RequestError(
            f"tool_choice.type is {choice.type[:40]!r} but must be auto, any, tool or none", "tool_choice.type"
        )
    return _CHOICES[choice.type], parallel


def _thinking(body: PromptFields) -> bool | None:
    if body.thinking is None:
        return None
    if body.thinking.type not in _THINKING:
        raise RequestError(
            f"thinking.type is {body.thinking.type[:40]!r} but must be one of {', '.join(_THINKING)}", "thinking.type"
        )
    return _THINKING[body.thinking.type]


def _one_format(body: PromptFields) -> OutputFormat | None:
    structured = body.structured_outputs if isinstance(body, MessagesRequest) else None
    return one_format(_output_format(body), "output_config.format", structured)


def _output_format(body: PromptFields) -> OutputFormat | None:
    given: FormatField | None = body.output_format
    where = "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        given, where = body.output_config.format, "output_config.format"
    if given is None:
        return None
    if given.type != "json_schema":
        raise RequestError(f"{where}.type is {given.type[:40]!r} but must be 'json_schema'", f"{where}.type")
    if given.json_schema is None:
        raise RequestError(f"{where}.schema is missing; give it", f"{where}.schema")
    return OutputFormat(StructuredOutputsParams(json=given.json_schema), f"{where}.schema")
