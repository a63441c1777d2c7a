"""A server around the fake engine: in this process for most tests, on a loopback socket where sockets matter."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from fastapi import FastAPI

from quire.config.groups import ServerConfig
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.server.adapters import ServedAdapters
from quire.server.app import build_app
from quire.server.launch import Server, uvicorn_config
from quire.server.tool_servers import ToolServers
from quire.types.errors import EngineUnavailableError
from quire.types.messages import EngineInfo
from tests.frontend.fake_client import VOCAB_SIZE, FakeClient, text_model
from tests.frontend.mortal import Keeper

MODEL = "fake-model"
LONG = 1_000_000


@dataclass(frozen=True)
class FakeHealth:
    status: str
    detail: str


@dataclass
class FakeProvider:
    """An engine that is there, unless `unavailable` says why it is not."""

    client: FakeClient
    text: TextModel = field(default_factory=text_model)
    unavailable: str | None = None
    status: str = "ready"

    def __post_init__(self) -> None:
        self._engine = AsyncEngine(self.client, self.text)

    @property
    def engine(self) -> AsyncEngine:
        if self.unavailable is not None:
            raise EngineUnavailableError(self.unavailable, retry_after=2.5)
        return self._engine

    def health(self) -> FakeHealth:
        return FakeHealth(self.status, self.unavailable or "it takes requests")


class ResumingProvider(FakeProvider):
    """Its engines come one after the other, each when the one before it has died."""

    def __init__(self, clients: Sequence[FakeClient], text: TextModel | None = None) -> None:
        coming = iter(clients)
        self.keeper = Keeper(lambda: next(coming))
        super().__init__(self.keeper.client, text or text_model())  # type: ignore[arg-type]

    @property
    def engine(self) -> AsyncEngine:
        self.keeper.start()
        return super().engine


def long_client(answer: Any, **options: Any) -> FakeClient:
    """A fake engine whose context is as good as endless."""
    client = FakeClient(answer, **options)
    client.info = EngineInfo(VOCAB_SIZE, LONG, 16, 64, 8)
    return client


def make_app(
    client: FakeClient | None = None,
    *,
    provider: FakeProvider | None = None,
    api_keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    tool_servers: ToolServers | None = None,
    adapters: ServedAdapters | None = None,
    observer: Observer = NULL_OBSERVER,
    **settings: Any,
) -> FastAPI:
    provider = provider or FakeProvider(client or FakeClient())
    return build_app(
        provider,
        provider.text,
        ServerConfig(**settings),
        model_names=(MODEL, "alias/name"),
        api_keys=api_keys,
        admin_keys=admin_keys,
        tool_servers=tool_servers,
        adapters=adapters,
        observer=observer,
    )


TLS = ("ssl_certfile", "ssl_keyfile")


def make_certificate(folder: Path) -> dict[str, str]:
    """The settings of a server with a certificate of its own for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]), datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(address, False).add_extension(x509.BasicConstraints(True, None), True)
    (folder / "cert.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return dict(zip(TLS, (str(folder / "cert.pem"), str(folder / "key.pem")), strict=True))


def http(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    """A client that talks to the app without sockets. A bug in the app is raised, not answered."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire", **options)


@asynccontextmanager
async def serving(client: FakeClient | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with http(make_app(client, **settings)) as session:
        yield session


def events_of(text: str) -> list[Any]:
    """The JSON of each event of a stream, whose framing is checked on the way."""
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


@dataclass
class LiveServer:
    """A server on a loopback socket, on an event loop of its own thread."""

    url: str
    port: int
    client: FakeClient
    loop: asyncio.AbstractEventLoop

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true on the server's loop, with a limit."""

        async def wait() -> None:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result()


@contextmanager
def live_server(
    client: FakeClient | None = None,
    *,
    provider: FakeProvider | None = None,
    app: FastAPI | None = None,
    port: int = 0,
    small_buffers: bool = False,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    **settings: Any,
) -> Iterator[LiveServer]:
    """With `small_buffers` the system holds little of what a slow reader has not read."""
    client = provider.client if provider else client or FakeClient()
    app = app or make_app(client, provider=provider, **settings)
    listener = socket.create_server(("127.0.0.1", port))
    if small_buffers:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    port = listener.getsockname()[1]
    of_connections = {name: settings[name] for name in ("header_timeout", *TLS) if name in settings}
    server = Server(uvicorn_config(app, ServerConfig(**of_connections)))
    loop = new_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(server, listener)), daemon=True)
    thread.start()
    try:
        yield LiveServer(f"http://127.0.0.1:{port}", port, client, loop)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()
        loop.close()


async def _serve(server: Server, listener: socket.socket) -> None:
    await server.serve(sockets=[listener])
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
