"""The MCP servers that the operator named: lists and calls their tools, within limits of time and size.

Each connection belongs to a task of its own, so that a request which is cancelled leaves it whole; it is opened when
first needed and again after it broke. Knows nothing of models or responses.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.config.groups import ServerConfig
from quire.config.server import ToolServerAddress, tool_server_addresses
from quire.server.errors import ToolServerError
from quire.types.errors import ConfigError
from quire.utils.log import get_logger

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock

logger = get_logger(__name__)

T = TypeVar("T")

_MOST_PAGES = 100  # of a list of tools
_LEAVING = 10.0  # seconds that connections get to close


@dataclass(frozen=True, slots=True)
class RemoteTool:
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool; `is_error` if the tool reports a failure."""

    text: str
    is_error: bool


class ToolServers:
    """All tool servers. Every failure of one is a ToolServerError, at the latest after `timeout` seconds."""

    def __init__(self, addresses: Sequence[ToolServerAddress], *, timeout: float, max_result_bytes: int) -> None:
        if addresses:
            _import_client()
        self._timeout = timeout
        self._max_result_bytes = max_result_bytes
        self._connections = {address.label: _Connection(address, timeout) for address in addresses}

    @property
    def labels(self) -> Sequence[str]:
        return tuple(self._connections)

    async def list_tools(self, label: str) -> list[RemoteTool]:
        """What the server offers now. A connection that broke while nobody used it is opened again."""
        connection = self._connections[label]
        if connection.is_open:
            try:
                return await self._ask(label, _all_tools)
            except ToolServerError as error:
                logger.info("connecting anew to the tool server %s: %s", label, error)
                connection.drop()
        return await self._ask(label, _all_tools)

    async def call(self, label: str, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool once; never twice, since a call may have done its work although no answer came."""
        result = await self._ask(label, lambda client: client.call_tool(name, dict(arguments)))
        return ToolResult(cut(_text_of(result), self._max_result_bytes), result.is_error)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    async def _ask(self, label: str, question: Callable[[Client], Awaitable[T]]) -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = self._connections[label]
        try:
            async with asyncio.timeout(self._timeout):
                return await question(await connection.client())
        except ToolServerError:
            raise
        except TimeoutError as error:
            raise ToolServerError(
                f"the tool server {label!r} did not answer within {self._timeout:g} s (--tool-call-timeout)"
            ) from error
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                connection.drop()
            raise ToolServerError(f"the tool server {label!r} failed: {error}") from error
        except Exception as error:  # of the transport: whatever a stranger's server causes must not end the response
            connection.drop()
            raise ToolServerError(f"the tool server {label!r} failed: {explain(error)}") from error


def _import_client() -> None:
    """Import the client library at start: later it would block the event loop for a second."""
    try:
        importlib.import_module("mcp")
    except ImportError as error:
        raise ConfigError("tool_server needs the MCP client; install it with: pip install 'quire[mcp]'") from error


def make_tool_servers(settings: ServerConfig) -> ToolServers:
    return ToolServers(
        tool_server_addresses(settings),
        timeout=settings.tool_call_timeout,
        max_result_bytes=settings.max_tool_result_bytes,
    )


class _Connection:
    """The connection to one server."""

    def __init__(self, address: ToolServerAddress, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._ready is not None

    async def client(self) -> Client:
        """The connected client; requests that come while it connects wait for the same connection."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._leave = asyncio.Event()
            task = asyncio.create_task(
                self._keep(self._ready, self._leave), name=f"quire-tool-server-{self._address.label}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._ready)

    def drop(self) -> None:
        """Drop the connection; the next request opens another."""
        self._leave.set()
        self._ready = None

    async def close(self) -> None:
        self.drop()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_LEAVING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _keep(self, ready: asyncio.Future[Client], leave: asyncio.Event) -> None:
        label = self._address.label
        try:
            async with asyncio.timeout(self._timeout) as limit, _client_for(self._address) as client:
                limit.reschedule(None)
                logger.info("connected to the tool server %s", label)
                ready.set_result(client)
                await leave.wait()
        except Exception as error:  # a stranger's server may fail in any way, while connecting or while leaving
            reason = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else explain(error)
            logger.warning("the connection to the tool server %s ended: %s", label, reason)
            _fail(ready, f"the tool server {label!r} cannot be reached: {reason}")
        finally:
            _fail(ready, f"the tool server {label!r} is being left")
            if self._ready is ready:
                self._ready = None


def _fail(ready: asyncio.Future[Client], message: str) -> None:
    if not ready.done():
        ready.set_exception(ToolServerError(message))
        ready.exception()  # the waiting request may be gone


def _client_for(address: ToolServerAddress) -> Client:
    from mcp import Client, StdioServerParameters

    if address.url is not None:
        return Client(address.url, cache=None)
    command, *words = address.command
    return Client(StdioServerParameters(command=command, args=words), cache=None)


async def _all_tools(client: Client) -> list[RemoteTool]:
    tools: list[RemoteTool] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            annotations = None if tool.annotations is None else tool.annotations.model_dump(exclude_none=True)
            tools.append(RemoteTool(tool.name, tool.description, tool.input_schema, annotations))
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _text_of(result: CallToolResult) -> str:
    if not result.content and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: ContentBlock) -> str:
    """The text of a block; for another kind of content, a note that it was left out."""
    from mcp.types import EmbeddedResource, TextContent, TextResourceContents

    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return f"[{block.type} left out]"


def cut(text: str, max_bytes: int) -> str:
    """The text, cut off after the limit in bytes, with a note that says how much is missing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    return f"{data[:max_bytes].decode('utf-8', 'ignore')}\n[cut off: {max_bytes} of {len(data)} bytes]"


def explain(error: BaseException) -> str:
    """What is behind an error, which transports wrap into groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
