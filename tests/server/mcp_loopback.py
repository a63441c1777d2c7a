"""An MCP server for tests: on a loopback socket, or over standard input and output with `python -m`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

LABEL = "loop"
NUM_TOOLS = 6


def make_server() -> MCPServer:
    server = MCPServer(LABEL, log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return f"{a} and {b} make {a + b}"

    @server.tool()
    def fail() -> str:
        """Says that it failed."""
        raise ToolError("it is raining")

    @server.tool()
    async def hang() -> str:
        """Never answers."""
        await anyio.sleep_forever()
        return ""

    @server.tool()
    def long() -> str:
        """Says too much."""
        return "ä" * 100_000

    @server.tool()
    def die() -> str:
        """Takes the server down."""
        os._exit(3)

    @server.tool(name="no good name")
    def unnameable() -> str:
        """Has a name that no model can be told."""
        return ""

    return server


@contextmanager
def http_server(port: int = 0) -> Iterator[str]:
    """The address of a running server."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(make_server().streamable_http_app(), log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        server.force_exit = True
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()
        assert not thread.is_alive()


if __name__ == "__main__":
    make_server().run("stdio")
