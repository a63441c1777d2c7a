"""Addresses, signals and ends of the server, with a fake keeper of the engine in place of the real one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.engine.spare import SPARE_MEMORY, SpareEngine
from quire.frontend.async_engine import AsyncEngine
from quire.server import launch
from quire.server.app import build_app
from quire.server.launch import Server, address_of, check_tls, listening_socket, serve, uvicorn_config
from quire.server.logs import setup_server_logging
from quire.types.errors import ConfigError, EngineError
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.frontend.fake_client import FakeClient, text_model
from tests.server.helpers import MODEL, FakeHealth, long_client, make_certificate
from tests.server.waiting import WaitingClient


@dataclass
class FakeSupervisor:
    client: FakeClient
    failure: EngineError | None = None
    calls: list[str] = field(default_factory=list)
    can_drain: bool = True

    def __post_init__(self) -> None:
        self.engine = AsyncEngine(self.client, text_model())
        self.fails = asyncio.Event()
        self.drained = asyncio.Event()
        self.draining = asyncio.Event()

    def health(self) -> FakeHealth:
        return FakeHealth("draining" if self.draining.is_set() else "ready", "")

    async def start(self) -> None:
        self.calls.append("start")

    async def wait_failed(self) -> EngineError:
        await self.fails.wait()
        return EngineError("the engine died 4 times in a row: out of luck")

    async def drain(self) -> bool:
        self.calls.append("drain")
        self.draining.set()
        await self.drained.wait()
        return self.can_drain

    async def stop(self) -> None:
        self.calls.append("stop")
        self.engine.shutdown()


@asynccontextmanager
async def running(
    supervisor: FakeSupervisor, settings: ServerConfig
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """A server in this process, and its task; it must have ended when the block does."""
    with listening_socket(settings) as listener:
        app = build_app(supervisor, text_model(), settings, model_names=(MODEL,))
        server = Server(uvicorn_config(app, settings))
        address = address_of(settings, listener)
        task = asyncio.create_task(serve(server, supervisor, listener, address))
        trust = ssl.create_default_context(cafile=settings.ssl_certfile) if settings.ssl_certfile else False
        transport = httpx.AsyncHTTPTransport(uds=settings.uds, retries=5, verify=trust)
        base = "http://quire" if settings.uds else address
        async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url=base) as client:
            while not server.started:
                await asyncio.sleep(0)
            yield client, task


ANY_PORT = ServerConfig(port=0)


async def test_sigterm_drains_and_ends_well() -> None:
    supervisor = FakeSupervisor(long_client("answer"))
    async with running(supervisor, ANY_PORT) as (client, task):
        assert (await client.get("/ready")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await supervisor.draining.wait()
        os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
        assert (await client.get("/ready")).status_code == 503
        supervisor.drained.set()
        await task
    assert supervisor.calls == ["start", "drain", "stop"]


async def test_a_stream_that_outlives_the_drain_hears_why() -> None:
    endless = long_client(lambda request: (65 for _ in range(10**6)))
    supervisor = FakeSupervisor(endless, can_drain=False)
    async with running(supervisor, ANY_PORT) as (client, task):
        body = {"prompt": "x", "stream": True, "max_tokens": 10**6}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert "choices" in await anext(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            supervisor.drained.set()
            rest = [line async for line in lines if line]
        await task
    assert "the engine was shut down" in rest[-2]
    assert rest[-1] == "data: [DONE]"


async def test_sigint_twice_stops_now() -> None:
    supervisor = FakeSupervisor(long_client("answer"))
    async with running(supervisor, ANY_PORT) as (_, task):
        os.kill(os.getpid(), signal.SIGINT)
        await supervisor.draining.wait()
        assert not task.done()
        os.kill(os.getpid(), signal.SIGINT)
        await task
    assert supervisor.calls == ["start", "drain", "stop"]


async def test_an_answer_that_does_not_end_with_its_engine_is_cancelled_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LAST_WRITES", 0.05)
    library = logging.getLogger("uvicorn")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(library, name, getattr(library, name))
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [])
    setup_server_logging("text")
    own = logging.getLogger("quire")  # whose level and handlers other tests may have changed
    for name, value in (("level", logging.INFO), ("propagate", True), ("disabled", False)):
        monkeypatch.setattr(own, name, value)
    caplog.set_level(logging.INFO)
    client = WaitingClient("never said")
    supervisor = FakeSupervisor(client)
    supervisor.engine.shutdown = lambda: None  # type: ignore[method-assign]  # what waits for it waits forever
    async with running(supervisor, ANY_PORT) as (session, task):
        asked = asyncio.create_task(session.post("/v1/completions", json={"prompt": "x", "stream": True}))
        while not client.added:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await supervisor.draining.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await task
        await asyncio.gather(asked, return_exceptions=True)
    assert "stopping now" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_failed_engine_ends_the_server_with_its_cause() -> None:
    supervisor = FakeSupervisor(FakeClient())
    async with running(supervisor, ANY_PORT) as (_, task):
        supervisor.fails.set()
        with pytest.raises(EngineError, match="out of luck"):
            await task
    assert supervisor.calls[-1] == "stop"


async def ended(task: asyncio.Task[None], supervisor: FakeSupervisor) -> None:
    supervisor.drained.set()
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def test_a_unix_socket_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    supervisor = FakeSupervisor(FakeClient("hello"))
    async with running(supervisor, ServerConfig(uds=str(path))) as (client, task):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "hello"
        with pytest.raises(ConfigError, match="cannot listen on the Unix socket"):
            listening_socket(ServerConfig(uds=str(path))).__enter__()
        await ended(task, supervisor)
    assert not path.exists()


def test_a_dead_servers_unix_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening_socket(ServerConfig(uds=str(path))):
        assert path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError):
        listening_socket(ServerConfig(uds=str(path))).__enter__()
    assert path.read_text() == "precious"


async def test_tls(tmp_path: Path) -> None:
    supervisor = FakeSupervisor(FakeClient("hello"))
    settings = ServerConfig(port=0, **make_certificate(tmp_path))
    async with running(supervisor, settings) as (client, task):
        assert client.base_url.scheme == "https"
        assert (await client.get("/version")).status_code == 200
        await ended(task, supervisor)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None) -> None:
    cert = tmp_path / "cert.pem"
    if content is not None:
        cert.write_text(content)
    with pytest.raises(ConfigError, match=r"ssl_certfile '.*cert\.pem' .* cannot be used: .*; give a PEM"):
        check_tls(ServerConfig(ssl_certfile=str(cert)))


async def test_a_path_prefix_of_a_proxy() -> None:
    supervisor = FakeSupervisor(FakeClient("hello"))
    async with running(supervisor, ServerConfig(port=0, root_path="/llm")) as (client, task):
        assert (await client.get("/v1/models")).status_code == 200
        assert "/llm/openapi.json" in (await client.get("/docs")).text
        await ended(task, supervisor)


@pytest.mark.parametrize("spare_engine", [True, False])
def test_a_spare_process_is_kept_and_counted_unless_told_otherwise(
    spare_engine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def look(config: EngineConfig, *more: object, spare: object, **others: object) -> None:
        reserved = SPARE_MEMORY if spare_engine else 0
        assert config.device.reserved_memory == reserved + 5
        assert isinstance(spare, SpareEngine) == spare_engine
        raise Seen

    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(tmp_path)
    monkeypatch.setattr(launch, "EngineSupervisor", look)
    monkeypatch.setattr(launch, "setup_server_logging", lambda log_format: None)
    config = EngineConfig.from_flat(model=tmp_path, reserved_memory=5)
    with pytest.raises(Seen):
        launch.run_server(config, ServerConfig(port=0, spare_engine=spare_engine))


def test_a_taken_port_is_said_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use; choose another with --port"):
            listening_socket(ServerConfig(port=port)).__enter__()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_foreign_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        listening_socket(ServerConfig(host=host)).__enter__()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ServerConfig(port=0), "http://127.0.0.1:"),
        (ServerConfig(port=0, host="::1"), "http://[::1]:"),
        (ServerConfig(port=0, ssl_certfile="c.pem"), "https://127.0.0.1:"),
    ],
)
def test_addresses(settings: ServerConfig, expected: str) -> None:
    with listening_socket(settings) as listener:
        assert address_of(settings, listener).startswith(expected)


def test_an_idle_connection_outlives_those_of_proxies() -> None:
    """A proxy that keeps a connection for longer than the server sends requests into closed ones."""
    assert uvicorn_config(FastAPI(), ServerConfig()).timeout_keep_alive > 60
