"""The tools of tool servers in a response: what a request asks for, what there is, and the calls the model makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.parsers.json_scan import parse_object
from quire.server.conversation.request import is_tool_name
from quire.server.errors import ToolServerError
from quire.server.generation.record import Called, Record
from quire.server.openai.responses.events import Event, ResponseEvents
from quire.server.openai.responses.items import flat_name
from quire.server.openai.responses.protocol import (
    McpCallItem,
    McpError,
    McpExecutionError,
    McpProtocolError,
    McpToolInfo,
)
from quire.server.tool_servers import RemoteTool, ToolServers
from quire.types.errors import RequestError
from quire.utils.log import get_logger

logger = get_logger(__name__)

# The operator decides where a server is and who may use it.
_OPERATORS = ("server_url", "connector_id", "authorization", "headers")
TOO_MANY = "not called: the response has made as many calls as it may (max_tool_calls)"


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of one server that a request lets the model call."""

    label: str
    tools: Sequence[RemoteTool]
    where: str

    def infos(self) -> list[McpToolInfo]:
        return [McpToolInfo(tool.name, tool.input_schema, tool.description, tool.annotations) for tool in self.tools]


async def list_remote_tools(
    servers: ToolServers, definitions: Sequence[Mapping[str, Any]] | None
) -> dict[int, Listing]:
    """A listing for each definition of type mcp, by its place among the tools. All servers are asked at once."""
    wanted = {
        index: definition
        for index, definition in enumerate(definitions or ())
        if definition.get("type") == "mcp" and not _can_be_left_out(definition, servers)
    }
    labels = [_label(definition, servers, f"tools[{index}]") for index, definition in wanted.items()]
    for position, (index, label) in enumerate(zip(wanted, labels, strict=True)):
        if label in labels[:position]:
            raise RequestError(
                f"tools[{index}] names the tool server {label!r} again; name it once", f"tools[{index}]"
            )
    found = await asyncio.gather(*(servers.list_tools(label) for label in labels), return_exceptions=True)
    listings = {}
    for (index, definition), label, tools in zip(wanted.items(), labels, found, strict=True):
        if isinstance(tools, BaseException):
            raise tools
        listings[index] = _listing(label, definition, tools, f"tools[{index}]")
    return listings


def _can_be_left_out(definition: Mapping[str, Any], servers: ToolServers) -> bool:
    return definition.get("optional") is True and definition.get("server_label") not in servers.labels


def _label(definition: Mapping[str, Any], servers: ToolServers, where: str) -> str:
    for name in _OPERATORS:
        if definition.get(name) is not None:
            raise RequestError(
                f"{where}.{name} is not taken: this server calls only the tool servers that it was started with"
                " (--tool-server); give their server_label alone",
                f"{where}.{name}",
            )
    if definition.get("require_approval") not in (None, "never"):
        raise RequestError(
            f"{where}.require_approval must be never: this server asks nobody before a call",
            f"{where}.require_approval",
        )
    label = definition.get("server_label")
    if label not in servers.labels:
        known = ", ".join(servers.labels) or "none"
        raise RequestError(
            f"{where}.server_label is {str(label)[:60]!r}; the tool servers of this server are: {known}",
            f"{where}.server_label",
        )
    return str(label)


def _listing(label: str, definition: Mapping[str, Any], tools: list[RemoteTool], where: str) -> Listing:
    usable = []
    for tool in tools:
        if is_tool_name(flat_name(tool.name, label)):
            usable.append(tool)
        else:
            logger.debug("leaving out the tool %r of %s: models cannot be told such a name", tool.name[:140], label)
    allowed = definition.get("allowed_tools")
    if isinstance(allowed, dict):
        if allowed.get("read_only") is True:
            usable = [tool for tool in usable if (tool.annotations or {}).get("read_only_hint") is True]
        allowed = allowed.get("tool_names")
    if allowed is None:
        return Listing(label, usable, where)
    place = f"{where}.allowed_tools"
    if not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
        raise RequestError(f"{place} must be a list of names", place)
    missing = set(allowed) - {tool.name for tool in usable}
    if missing:
        raise RequestError(
            f"{place} has {min(missing)[:140]!r}, which the tool server {label!r} does not have", place
        )
    return Listing(label, [tool for tool in usable if tool.name in allowed], where)


async def run_calls(
    servers: ToolServers,
    events: ResponseEvents,
    calls: Sequence[tuple[int, McpCallItem]],
    most: int | None,
    record: Record,
) -> AsyncGenerator[list[Event], None]:
    """Run at most `most` of the waiting calls concurrently, and yield the events of their results in order.

    Calls whose results are recorded are not made again.
    """
    made = calls if most is None else calls[:most]
    tasks = [asyncio.create_task(_result(servers, index, item, record)) for index, item in made]
    try:
        for (index, _), task in zip(made, tasks, strict=True):
            result = await task
            if isinstance(result, str):
                yield events.call_result(index, output=result)
            else:
                yield events.call_result(index, error=result)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for index, _ in calls[len(made) :]:
        yield events.call_result(index, error=McpProtocolError(TOO_MANY))


async def _result(servers: ToolServers, index: int, item: McpCallItem, record: Record) -> str | McpError:
    known = record.called(index)
    if known is not None and known.error is not None:
        error: McpError = msgspec.convert(known.error, McpError)
        return error
    if known is not None and known.output is not None:
        return known.output
    result = await _call(servers, item)
    if isinstance(result, str):
        record.add(Called(index, result))
    else:
        record.add(Called(index, error=msgspec.to_builtins(result)))
    return result


async def _call(servers: ToolServers, item: McpCallItem) -> str | McpError:
    try:
        arguments = parse_object(item.arguments or "{}")
    except ValueError as error:
        return McpProtocolError(f"the arguments are not a JSON object: {error}")
    try:
        result = await servers.call(item.server_label, item.name, arguments)
    except ToolServerError as error:
        return McpProtocolError(str(error))
    return McpExecutionError([{"type": "text", "text": result.text}]) if result.is_error else result.text
