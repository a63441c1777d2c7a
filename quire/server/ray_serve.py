"""Quire as a deployment of Ray Serve: each of its replicas is a server of one model, behind Ray Serve's HTTP proxy.

    serve run quire.server.ray_serve:app model=smollm2

Imports Ray only where a deployment is made of it, so that the rest works without.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.config.server import check_server, collect_admin_keys, collect_api_keys
from quire.engine.settings import check_settings
from quire.frontend.text_model import load_text_model
from quire.frontend.topology import with_topology
from quire.loader.describe import describe_model
from quire.loader.hub import find_model
from quire.metrics.telemetry import make_telemetry
from quire.server.adapters import read_lora_modules
from quire.server.app import build_app
from quire.server.logs import setup_server_logging
from quire.server.metrics_route import make_metrics_router
from quire.server.supervisor import EngineSupervisor, SupervisorOptions
from quire.server.tool_servers import make_tool_servers
from quire.types.errors import ConfigError, EngineDeadError

_SERVER = frozenset(field.name for field in fields(ServerConfig))
_OF_THE_PROXY = (
    *("host", "port", "uds", "api_server_count", "models", "admin", "ssl_certfile", "ssl_keyfile", "spare_engine"),
)
_PLACEMENT = ("num_replicas", "autoscaling_config", "ray_actor_options", "max_ongoing_requests")


class QuireServer:
    """One replica. Ray Serve asks for its health before it sends requests: the engine starts then."""

    def __init__(self, **settings: Any) -> None:
        """Settings of the engine and of the server, by their names."""
        of_server = {name: value for name, value in settings.items() if name in _SERVER}
        refused = next((name for name in of_server if name in _OF_THE_PROXY), None)
        if refused is not None:
            raise ConfigError(f"{refused} is for `quire serve`; Ray Serve has its own HTTP proxy, so leave it out")
        engine = {name: value for name, value in settings.items() if name not in _SERVER}
        self._config = EngineConfig.from_flat(**engine)
        hints = {name: tuple(value) if isinstance(value, list) else value for name, value in of_server.items()}
        self._settings = msgspec.convert(hints, ServerConfig)
        check_server(self._settings)
        self._starting: asyncio.Task[tuple[EngineSupervisor, FastAPI]] | None = None

    async def check_health(self) -> None:
        """Raise why it cannot serve. The first call starts the engine and waits until it is ready."""
        supervisor, _ = await self._started()
        health = supervisor.health()
        if health.status in ("failed", "stopped"):
            raise EngineDeadError(f"the engine is {health.status}: {health.detail}")

    async def __call__(self, request: Request) -> StreamingResponse:
        _, app = await self._started()
        return await respond(app, request)

    async def stop(self) -> None:
        """End the engine. Ray ends it with the replica's process anyway."""
        if self._starting is not None:
            supervisor, _ = await self._starting
            await supervisor.stop()

    async def _started(self) -> tuple[EngineSupervisor, FastAPI]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> tuple[EngineSupervisor, FastAPI]:
        settings = self._settings
        setup_server_logging(settings.log_format)
        await asyncio.to_thread(check_settings, self._config)
        config = await asyncio.to_thread(partial(with_topology, self._config, most_replicas=1))
        text = await asyncio.to_thread(load_text_model, config.model)
        names = settings.served_model_name or (config.model.model,)
        telemetry = make_telemetry(names[0], log_interval=settings.stats_interval)
        options = SupervisorOptions(stall_timeout=settings.stall_timeout, max_restarts=settings.max_restarts)
        adapters = read_lora_modules(settings.lora_modules, names)
        supervisor = EngineSupervisor(config, text, options, observer=telemetry.observer, adapters=adapters.refs)
        app = build_app(
            supervisor,
            text,
            settings,
            model_names=names,
            api_keys=collect_api_keys(settings),
            admin_keys=collect_admin_keys(settings),
            observer=telemetry.observer,
            extra_routers=[make_metrics_router(telemetry.prometheus)],
            tool_servers=make_tool_servers(settings),
            adapters=adapters,
            description=describe_model(find_model(config.model)),
        )
        await supervisor.start()
        for work in app.state.on_ready:
            await work()
        return supervisor, app


async def respond(app: ASGIApp, request: Request) -> StreamingResponse:
    """The answer of an ASGI application, as it comes. Who stops reading it disconnects from the application."""
    body, sent, gone = await request.body(), asyncio.Queue[MutableMapping[str, Any]](), asyncio.Event()
    is_given = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_given
        if is_given:
            await gone.wait()
            return {"type": "http.disconnect"}
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> None:
        try:
            await app(dict(request.scope), receive, sent.put)
        finally:
            await sent.put({"type": "http.response.end"})

    running = asyncio.create_task(run())
    start = await sent.get()
    if start["type"] != "http.response.start":
        await running  # raises what went wrong
        raise RuntimeError("the application has not answered")

    async def chunks() -> AsyncIterator[bytes]:
        try:
            while (message := await sent.get())["type"] == "http.response.body":
                yield message.get("body", b"")
            await running
        finally:
            gone.set()

    response = StreamingResponse(chunks(), status_code=start["status"])
    response.raw_headers = [(bytes(name), bytes(value)) for name, value in start["headers"]]
    return response


def app(arguments: dict[str, Any]) -> Any:
    """An application for `serve run` and for Ray Serve's config files.

    Arguments are settings of the engine and of the server, and num_replicas, autoscaling_config, ray_actor_options
    (such as {"num_gpus": 2}) and max_ongoing_requests of the deployment. Text that is JSON, such as a number, counts
    as what it says.
    """
    from ray import serve

    given = {name: _value(value) for name, value in arguments.items()}
    options = {name: given.pop(name) for name in _PLACEMENT if name in given}
    QuireServer(**given)  # a wrong setting is refused here, before anything is placed
    options.setdefault("max_ongoing_requests", 1000)  # the engine has its own queue
    return serve.deployment(QuireServer, name="Quire").options(**options).bind(**given)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
