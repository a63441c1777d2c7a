"""Tool servers over loopback: both transports, and servers that are dead, slow, too talkative, or come back."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from quire.config.groups import ServerConfig
from quire.server.errors import ToolServerError
from quire.server.tool_servers import ToolServers, cut, explain, make_tool_servers
from quire.types.errors import ConfigError
from tests.server.mcp_loopback import LABEL, NUM_TOOLS, http_server

STDIO = f"stdio:{sys.executable} -m tests.server.mcp_loopback"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as address:
        yield address


@asynccontextmanager
async def connected(target: str, timeout: float = 30.0, max_bytes: int = 1 << 16) -> AsyncIterator[ToolServers]:
    """Nothing is left of the connections afterwards."""
    before = asyncio.all_tasks()
    servers = make_tool_servers(
        ServerConfig(tool_server=(f"{LABEL}={target}",), tool_call_timeout=timeout, max_tool_result_bytes=max_bytes)
    )
    try:
        yield servers
    finally:
        await servers.close()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_tools_are_listed_and_called(transport: str, url: str) -> None:
    async with connected(url if transport == "http" else STDIO) as servers:
        tools = await servers.list_tools(LABEL)
        assert len(tools) == NUM_TOOLS
        assert tools[0].name == "add"
        assert tools[0].description == "Adds two numbers."
        assert tools[0].input_schema["required"] == ["a", "b"]
        both = await asyncio.gather(*(servers.call(LABEL, "add", {"a": 1, "b": b}) for b in (2, 3)))
        assert [result.text for result in both] == ["1 and 2 make 3", "1 and 3 make 4"]
        failed = await servers.call(LABEL, "fail", {})
        assert failed.is_error
        assert "it is raining" in failed.text
        assert (await servers.call(LABEL, "add", {"a": "x"})).is_error
        assert (await servers.call(LABEL, "nonesuch", {})).is_error


async def test_a_long_result_is_cut(url: str) -> None:
    async with connected(url, max_bytes=101) as servers:
        result = await servers.call(LABEL, "long", {})
    assert result.text == "ä" * 50 + "\n[cut off: 101 of 200000 bytes]"
    assert cut("short", 5) == "short"


async def test_a_slow_server_is_not_waited_for(url: str) -> None:
    async with connected(url, timeout=1.0) as servers:
        assert await servers.list_tools(LABEL)
        with pytest.raises(ToolServerError, match="within 1 s"):
            await servers.call(LABEL, "hang", {})
        assert not (await servers.call(LABEL, "add", {"a": 1, "b": 2})).is_error


async def test_who_cancels_a_call_leaves_the_connection_whole(url: str) -> None:
    async with connected(url) as servers:
        await servers.list_tools(LABEL)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await servers.call(LABEL, "hang", {})
        assert not (await servers.call(LABEL, "add", {"a": 1, "b": 2})).is_error


async def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with connected(f"http://127.0.0.1:{silent.getsockname()[1]}/mcp", timeout=0.5) as servers:
            with pytest.raises(ToolServerError, match="within"):
                await servers.list_tools(LABEL)


@pytest.mark.parametrize("target", ["stdio:no-such-command-anywhere", "http://127.0.0.1:9/mcp", "stdio:true"])
async def test_a_dead_server_is_named(target: str) -> None:
    async with connected(target) as servers:
        for _ in range(2):
            with pytest.raises(ToolServerError, match=LABEL):
                await servers.list_tools(LABEL)


async def test_a_server_that_died_is_started_again() -> None:
    async with connected(STDIO) as servers:
        with pytest.raises(ToolServerError, match="closed"):
            await servers.call(LABEL, "die", {})
        assert len(await servers.list_tools(LABEL)) == NUM_TOOLS


async def test_a_server_that_came_back_is_found_again() -> None:
    with http_server() as address:
        servers = make_tool_servers(ServerConfig(tool_server=(f"{LABEL}={address}",)))
        await servers.list_tools(LABEL)
    try:
        with pytest.raises(ToolServerError, match=LABEL):
            await servers.list_tools(LABEL)
        with http_server(int(address.rpartition(":")[2].partition("/")[0])):
            assert len(await servers.list_tools(LABEL)) == NUM_TOOLS
    finally:
        await servers.close()


def test_without_the_client_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"quire\[mcp\]"):
        make_tool_servers(ServerConfig(tool_server=("a=stdio:x",)))
    assert make_tool_servers(ServerConfig()).labels == ()


def test_errors_are_taken_out_of_their_groups() -> None:
    assert explain(ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("why")])])) == "why"
    assert explain(KeyError()) == "KeyError"
