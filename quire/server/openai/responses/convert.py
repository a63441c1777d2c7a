"""Turns a Responses request into a Conversation, and the beginning of the response that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from quire.server.context import ServerContext
from quire.server.conversation.request import (
    AUTO,
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
from quire.server.openai.responses.items import Item, flat_name, messages_of
from quire.server.openai.responses.mcp import Listing
from quire.server.openai.responses.protocol import Response, ResponsesRequest
from quire.server.openai.tool_choice import choice_of_word
from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams

_MOST_METADATA = 16
INCLUDABLE = ("reasoning.encrypted_content", "message.output_text.logprobs")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request under the names that the model reads."""

    tools: tuple[Tool, ...]
    namespaces: Mapping[str, tuple[str, str]]
    """Flat name -> (namespace, own name), for those that are in one."""
    remote: Mapping[str, tuple[str, str]]
    """Flat name -> (label of the tool server, own name), for those that the server calls itself."""
    listings: Sequence[Listing] = ()


def toolbox_of(
    definitions: Sequence[Mapping[str, Any]] | None, listings: Mapping[int, Listing] | None = None
) -> Toolbox:
    """Functions, alone or in namespaces, and tools of tool servers, whose `listings` are by their place.

    A tool that only OpenAI runs is refused, unless it says it is optional.
    """
    tools: list[Tool] = []
    namespaces: dict[str, tuple[str, str]] = {}
    remote: dict[str, tuple[str, str]] = {}
    listings = listings or {}
    for index, definition in enumerate(definitions or ()):
        where = f"tools[{index}]"
        kind = definition.get("type")
        if kind == "function":
            tools.append(_function(definition, None, where))
        elif kind == "namespace":
            space = text_of(definition, "name", where)
            for position, member in enumerate(_members(definition, where)):
                tool = _function(member, space, f"{where}.tools[{position}]")
                namespaces[tool.name] = (space, str(member["name"]))
                tools.append(tool)
        elif index in listings:
            label = listings[index].label
            for found in listings[index].tools:
                name = flat_name(found.name, label)
                remote[name] = (label, found.name)
                tools.append(Tool(name, found.description, found.input_schema, where=where))
        elif not is_optional(definition):
            raise RequestError(
                f"{where} is of type {str(kind)[:60]!r}, which this server does not run; give functions, or mark it"
                ' with "optional": true to go on without it',
                f"{where}.type",
            )
    return Toolbox(tuple(tools), namespaces, remote, tuple(listings.values()))


def is_optional(definition: Mapping[str, Any]) -> bool:
    """Whether a hosted tool may be left out: it is marked optional, or is a search without access to the web."""
    return definition.get("optional") is True or definition.get("external_web_access") is False


def conversation_of(
    context: ServerContext, body: ResponsesRequest, items: Sequence[Item], toolbox: Toolbox
) -> Conversation:
    choice, tools = tool_choice_of(body.tool_choice, toolbox)
    check_tools(tools, choice)
    return Conversation(
        messages=messages_of(items, body.instructions),
        tools=tuple(tools),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output_format=one_format(_output_format(body), "text.format", body.structured_outputs),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        template=template_options(context.settings, body),
    )


def tool_choice_of(value: str | dict[str, Any] | None, toolbox: Toolbox) -> tuple[ToolChoice, list[Tool]]:
    """The tool choice, and the tools that may be called."""
    tools = list(toolbox.tools)
    if value is None:
        return AUTO, tools
    if isinstance(value, str):
        return choice_of_word(value), tools
    kind = value.get("type")
    if kind in ("function", "mcp"):
        names = _chosen(value, toolbox, "tool_choice")
        named = len(names) == 1 and (kind == "function" or value.get("name") is not None)
        return (ToolChoice("named", names[0]), tools) if named else (REQUIRED, _only(tools, names))
    if kind != "allowed_tools" or value.get("mode") not in ("auto", "required"):
        raise RequestError(
            f"tool_choice is {str(value)[:80]!r} but must be of type 'function' or 'mcp', or of type 'allowed_tools'"
            " with the mode auto or required",
            "tool_choice",
        )
    listed = value.get("tools")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise RequestError("tool_choice.tools must be a list of tools", "tool_choice.tools")
    allowed = [
        name for index, entry in enumerate(listed) for name in _chosen(entry, toolbox, f"tool_choice.tools[{index}]")
    ]
    missing = set(allowed) - {tool.name for tool in tools}
    if missing:
        raise RequestError(f"tool_choice allows {min(missing)[:140]!r}, which is not in tools", "tool_choice.tools")
    return choice_of_word(value["mode"]), _only(tools, allowed)


def _chosen(entry: Mapping[str, Any], toolbox: Toolbox, where: str) -> list[str]:
    """The flat names of what a choice names: a function, a tool of a tool server, or all tools of one."""
    label = entry.get("server_label")
    if entry.get("type") != "mcp":
        return [flat_name(text_of(entry, "name", where), entry.get("namespace"))]
    own = entry.get("name")
    names = [flat for flat, (of, name) in toolbox.remote.items() if of == label and own in (None, name)]
    if not names:
        raise RequestError(
            f"{where} names {str(own or 'tools')[:60]!r} of the tool server {str(label)[:60]!r}, not in tools",
            where,
        )
    return names


def _only(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    return [tool for tool in tools if tool.name in names]


def response_of(body: ResponsesRequest, response_id: str, created: int, model: str) -> Response:
    """The response before its first output."""
    check_fields(body)
    return Response(
        id=response_id,
        created_at=created,
        status="queued" if body.background else "in_progress",
        model=model,
        instructions=body.instructions,
        tools=body.tools or [],
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        text={"format": {"type": "text"}}
        if body.text is None
        else body.text.model_dump(by_alias=True, exclude_none=True),
        reasoning=None if body.reasoning is None else body.reasoning.model_dump(exclude_none=True),
        previous_response_id=body.previous_response_id,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        background=bool(body.background),
        store=body.store is not False,
        temperature=body.temperature,
        top_p=body.top_p,
        top_logprobs=body.top_logprobs or 0,
        user=UNSET if body.user is None else body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def check_fields(body: ResponsesRequest) -> None:
    if body.background and body.store is False:
        raise RequestError("background is set but store is false, so nobody could ask for the answer", "store")
    if body.truncation not in (None, "auto", "disabled"):
        raise RequestError(f"truncation is {body.truncation[:40]!r} but must be auto or disabled", "truncation")
    if len(body.metadata or ()) > _MOST_METADATA:
        raise RequestError(f"metadata has more than {_MOST_METADATA} entries", "metadata")
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise RequestError(
                f"include[{index}] is {name[:60]!r}; this server can include: {', '.join(INCLUDABLE)}",
                f"include[{index}]",
            )


def _output_format(body: ResponsesRequest) -> OutputFormat | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return OutputFormat(StructuredOutputsParams(json_object=True), "text.format")
    if wanted.type != "json_schema":
        raise RequestError(
            f"text.format.type is {wanted.type[:40]!r} but must be text, json_object or json_schema",
            "text.format.type",
        )
    if wanted.json_schema is None:
        raise RequestError("text.format.schema is missing; give it", "text.format.schema")
    return OutputFormat(StructuredOutputsParams(json=wanted.json_schema), "text.format.schema", bool(wanted.strict))


def _function(definition: Mapping[str, Any], namespace: str | None, where: str) -> Tool:
    parameters = definition.get("parameters")
    description = definition.get("description")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where}.parameters must be a JSON schema", f"{where}.parameters")
    name = flat_name(text_of(definition, "name", where), namespace)
    text = description if isinstance(description, str) else None
    return Tool(name, text, parameters, bool(definition.get("strict")), where)


def _members(definition: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    members = definition.get("tools")
    if not isinstance(members, list) or not all(
        isinstance(member, dict) and member.get("type") == "function" for member in members
    ):
        raise RequestError(f"{where}.tools must be a list of functions", f"{where}.tools")
    return members
