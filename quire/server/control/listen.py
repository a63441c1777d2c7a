"""Serves the admin surface, or another app, beside the main server, in the same event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import uvicorn
from starlette.applications import Starlette

from quire.config.groups import ServerConfig
from quire.config.server import admin_address, collect_admin_keys
from quire.server.control.app import build_admin_app
from quire.server.control.verbs import Controlled
from quire.utils.log import get_logger

logger = get_logger(__name__)

_LAST_WRITES = 2  # seconds


class _Server(uvicorn.Server):
    """Signals are the main server's."""

    @contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # uvicorn's has no types
        yield


def admin_settings(settings: ServerConfig) -> ServerConfig | None:
    """Where the admin surface listens, as settings of a socket; None: nowhere."""
    address = admin_address(settings)
    if address is None:
        return None
    if address.path is not None:
        return replace(settings, uds=address.path)
    return replace(settings, uds=None, host=address.host, port=address.port)


@asynccontextmanager
async def serving_admin(
    settings: ServerConfig,
    listener: socket.socket | None,
    server: Controlled | Mapping[str, Controlled],
    address: str,
) -> AsyncIterator[None]:
    """Serve until the block ends; nothing without a listener."""
    if listener is None:
        yield
        return
    async with serving_beside(build_admin_app(server, collect_admin_keys(settings)), listener, "quire-admin"):
        logger.info("admin surface on %s", address)
        yield


@asynccontextmanager
async def serving_beside(app: Starlette, listener: socket.socket, name: str) -> AsyncIterator[None]:
    """Serve an app until the block ends, in a task of this name."""
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_WRITES,
    )
    server = _Server(config)
    listener.listen()  # who connects before the server has started waits for it
    task = asyncio.create_task(server.serve(sockets=[listener]), name=name)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([task], timeout=2 * _LAST_WRITES)
        task.cancel()
