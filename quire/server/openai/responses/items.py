"""Turns the items of a response's input into the messages of a Conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.parsers.json_scan import parse_object
from quire.server.conversation.request import text_of
from quire.server.openai.responses.events import CUT_SHORT, decrypt
from quire.types.errors import RequestError

Item = dict[str, Any]

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
SEPARATOR = "__"
"""Between a namespace and the name of a tool in it, in the name that the model reads."""


def flat_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def response_id_of(item_id: str) -> str:
    """The response that an item of an output belongs to."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def items_of(value: str | Sequence[Item]) -> list[Item]:
    """The input as a list of items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return list(value)


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Messages in the templates' shape. Consecutive items of the assistant are one message."""
    builder = _Builder()
    if instructions:
        builder.messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        builder.add(item, f"input[{index}]")
    builder.close()
    if not builder.messages:
        raise RequestError("input is empty; give text or items", "input")
    return builder.messages


class _Builder:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the assistant's message that is being put together

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._assistant()["reasoning_content"] = _reasoning(item)
        elif kind in ("function_call", "mcp_call"):
            if not _is_cut_short(item):
                self._call(item, where)
        elif kind == "function_call_output":
            call_id = text_of(item, "call_id", where)
            self._result(call_id, _output(item.get("output"), f"{where}.output"))
        elif kind != "mcp_list_tools":  # which is for the client only
            raise RequestError(
                f"{where} is of type {str(kind)[:60]!r}, which this server does not take; send messages, function"
                " calls, their outputs and reasoning",
                f"{where}.type",
            )

    def close(self) -> None:
        if self._open is not None:
            self.messages.append(self._open)
            self._open = None

    def _assistant(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
        return self._open

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role is {str(role)[:40]!r} but must be one of {', '.join(_ROLES)}", f"{where}.role"
            )
        text = _output(item.get("content"), f"{where}.content")
        if role == "assistant":
            message = self._assistant()
            if "tool_calls" in message:  # text after calls is a new message
                self.close()
                message = self._assistant()
            message["content"] += text
        else:
            self.close()
            self.messages.append({"role": _ROLES[role], "content": text})

    def _call(self, item: Item, where: str) -> None:
        name = flat_name(text_of(item, "name", where), item.get("namespace") or item.get("server_label"))
        arguments = text_of(item, "arguments", where)
        try:
            parsed = parse_object(arguments or "{}")
        except ValueError as error:
            raise RequestError(
                f"{where}.arguments is not a JSON object: {error}; correct it", f"{where}.arguments"
            ) from error
        call_id = item.get("call_id") or item.get("id") or ""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}
        self._assistant().setdefault("tool_calls", []).append(call)
        if item.get("type") == "mcp_call":
            self._result(str(call_id), item["output"] if isinstance(item.get("output"), str) else _error_text(item))

    def _result(self, call_id: str, text: str) -> None:
        self.close()
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _is_cut_short(item: Item) -> bool:
    """Whether an answer of this server ended within this call, so that it was not run."""
    if item.get("status") in ("in_progress", "incomplete"):
        return True
    return item.get("type") == "mcp_call" and _error_text(item) == CUT_SHORT


def _error_text(item: Item) -> str:
    """Why a call of a tool server has no output."""
    error = item.get("error")
    if not isinstance(error, dict):
        return str(error or "")
    content = error.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(error.get("message", ""))


def _output(value: Any, where: str) -> str:
    """Text, or parts of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be text or a list of parts", where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where} is of type {str(kind)[:60]!r}, and this server takes only text for now; send type 'input_text'",
            f"{where}.type",
        )
    return text_of(part, _TEXT_PARTS[kind], where)


def _reasoning(item: Item) -> str:
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list):
            text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            if text:
                return text
    kept = item.get("encrypted_content")
    return decrypt(kept) if isinstance(kept, str) else ""
