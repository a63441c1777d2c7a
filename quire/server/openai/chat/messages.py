"""Turns a client's messages into those that a chat template reads, and renders them; knows text, not tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from quire.server.context import ServerContext
from quire.server.openai.chat.protocol import ChatMessage, ContentPart, TemplateFields
from quire.types.errors import RequestError, TokenizerError

_TEXT_TYPES = ("text", "input_text", "output_text")
_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
# A template that a stranger wrote, or a long conversation, is rendered on a thread to keep the event loop free.
_LONG_CONVERSATION = 20_000


async def render(context: ServerContext, body: TemplateFields) -> str:
    """The prompt of a conversation."""
    if body.chat_template is not None and not context.settings.allow_request_chat_template:
        raise RequestError(
            "chat_template in a request is not allowed here; the server can allow it (--allow-request-chat-template)",
            "chat_template",
        )
    messages = [template_message(message, index) for index, message in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    variables = dict(body.chat_template_kwargs or {})
    reserved = sorted(_RESERVED & variables.keys())
    if reserved:
        raise RequestError(
            f"chat_template_kwargs has {reserved[0]!r}, which the request sets elsewhere; rename it",
            "chat_template_kwargs",
        )
    if body.documents is not None:
        variables["documents"] = body.documents

    def render_now() -> str:
        return context.text.render_chat(
            messages,
            chat_template=body.chat_template,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=variables,
        )

    try:
        if body.chat_template is not None or _size(messages) > _LONG_CONVERSATION:
            return await asyncio.to_thread(render_now)
        return render_now()
    except TokenizerError as error:
        if body.chat_template is None:
            raise
        raise RequestError(str(error), "chat_template") from error


def template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message without nulls, its content text or text parts, and its tool calls' arguments as objects."""
    where = f"messages[{index}]"
    result: dict[str, Any] = {"role": message.role}
    content = message.content
    if isinstance(content, list):
        result["content"] = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    else:
        result["content"] = content or ""
    others = message.model_dump(exclude={"role", "content", "tool_calls"}, exclude_none=True)
    result.update(others)
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}].function.arguments")
            for i, call in enumerate(message.tool_calls)
        ]
    return result


def last_text(body: TemplateFields) -> str:
    """The text of the last message, if it is the assistant's."""
    last = body.messages[-1]
    if last.role != "assistant":
        return ""
    if isinstance(last.content, list):
        return "\n".join(part if isinstance(part, str) else part.text or "" for part in last.content)
    return last.content or ""


def _text_part(part: ContentPart | str, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.type not in _TEXT_TYPES:
        raise RequestError(
            f"{where} is of type {part.type[:40]!r}, and this server takes only text for now; send type 'text'",
            f"{where}.type",
        )
    if part.text is None:
        raise RequestError(f"{where} has no text; give it one", f"{where}.text")
    return {"type": "text", "text": part.text}


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Clients send arguments as JSON in a string; templates print them as objects."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RequestError(f"{where} is not a JSON object: {error}; correct it", where) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _size(messages: list[dict[str, Any]]) -> int:
    return sum(
        len(content) if isinstance(content := message["content"], str) else sum(len(part["text"]) for part in content)
        for message in messages
    )
