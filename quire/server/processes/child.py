"""An API process: `python -m quire.server.processes.child`, one of several that `quire serve` launches.

It has the tokenizer, the templates and all routes, and no engine. Its order comes as one line of JSON on stdin. It
leaves when stdin is closed; signals are its parent's business.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from fastapi import FastAPI

from quire.config.env import log_level
from quire.config.groups import ServerConfig
from quire.engine.process import keep_beating
from quire.frontend.text_model import TextModel, load_text_model
from quire.loader.describe import describe_model
from quire.loader.hub import find_model
from quire.platform.allocator import keep_little_free_memory
from quire.server.adapters import read_lora_modules
from quire.server.app import build_model_app, protect
from quire.server.launch import Server, listening_socket, loop_factory, uvicorn_config
from quire.server.logs import setup_server_logging
from quire.server.processes.client import RelayedProvider
from quire.server.processes.forward import Forwarding, Neighbours, parent_router
from quire.server.processes.messages import ApiOrder, Failed
from quire.server.tool_servers import ToolServers, make_tool_servers
from quire.types.errors import QuireError
from quire.utils.log import get_logger, setup_logging

logger = get_logger("quire.server.processes.child")  # not __main__

_COUNT_INTERVAL = 0.25  # seconds between two messages about what was counted
_LISTEN_INTERVAL = 0.01  # seconds between two looks whether uvicorn has begun


def make_process_app(
    order: ApiOrder, provider: RelayedProvider, text: TextModel, tool_servers: ToolServers
) -> FastAPI:
    settings, config = order.settings, order.config
    names = settings.served_model_name or (config.model.model,)
    neighbours = Neighbours(order.folder, order.secret)
    paths = ("/metrics", "/console/events") if settings.ui else ("/metrics",)
    app = build_model_app(
        provider,
        text,
        settings,
        model_names=names,
        observer=provider.events,
        extra_routers=[parent_router(neighbours, paths)],
        tool_servers=tool_servers,
        adapters=read_lora_modules(settings.lora_modules, names),
        description=describe_model(find_model(config.model)),
    )
    app.add_middleware(Forwarding, neighbours=neighbours, index=order.index, num_processes=settings.api_server_count)
    protect(app, settings, order.api_keys, order.admin_keys, provider.events)
    return app


async def serve_process(order: ApiOrder, provider: RelayedProvider) -> None:
    """Serve until stdin is closed."""
    settings = share_of(order.settings)
    listener = socket.socket(fileno=order.listener_fd)
    tool_servers = make_tool_servers(settings)
    text = load_text_model(order.config.model)
    app = make_process_app(msgspec.structs.replace(order, settings=settings), provider, text, tool_servers)
    path = Neighbours(order.folder, order.secret).socket_path(str(order.index))
    private = replace(settings, uds=path, ssl_certfile=None, ssl_keyfile=None)  # TLS is for clients
    servers = [Server(uvicorn_config(app, each)) for each in (settings, private)]
    gc.collect()
    gc.freeze()  # as in a server of one process

    def leave() -> None:
        for server in servers:
            server.should_exit = True
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), leave)
    provider.attach(text)
    with listening_socket(private) as neighbour_listener:
        telling = asyncio.create_task(_tell(servers, provider), name="quire-counts")
        try:
            sockets = (listener, neighbour_listener)
            await asyncio.gather(*(server.serve([each]) for server, each in zip(servers, sockets, strict=True)))
        finally:
            telling.cancel()
            provider.end_streams("the server is stopping")
            await asyncio.gather(*(server.end_answers() for server in servers))
            await tool_servers.close()


async def _tell(servers: Sequence[Server], provider: RelayedProvider) -> None:
    """Say when connections are accepted, and from then on what is counted."""
    while not all(server.started for server in servers):
        await asyncio.sleep(_LISTEN_INTERVAL)
    provider.note_listening()
    while True:
        await asyncio.sleep(_COUNT_INTERVAL)
        provider.flush()


def share_of(settings: ServerConfig) -> ServerConfig:
    """What is a limit of the whole server, as a limit of one of its processes."""
    return replace(settings, max_queue=-(-settings.max_queue // settings.api_server_count))


async def run(order: ApiOrder) -> int:
    provider = RelayedProvider(order.meeting)
    try:
        await serve_process(order, provider)
    except QuireError as error:  # a wrong setting: to start again would not help
        provider.send(Failed(str(error)))
        return 1
    finally:
        provider.close()
    return 0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup_logging(log_level())
    line = sys.stdin.buffer.readline()
    if not line:  # the parent is gone
        return 0
    order = msgspec.json.decode(line, type=ApiOrder)
    setup_server_logging(order.settings.log_format)
    keep_little_free_memory()
    threading.Thread(target=keep_beating, args=(order.beat_fd,), name="quire-heartbeat", daemon=True).start()
    parent = os.getppid()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run(order))
    finally:
        if os.getppid() != parent:  # it was killed, and cannot clean up
            order.meeting.remove()
            shutil.rmtree(order.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
