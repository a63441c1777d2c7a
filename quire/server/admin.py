"""Routes about the server itself: is it alive, is it ready, what is it."""

from __future__ import annotations

from typing import Any, Literal, get_origin, get_type_hints

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import quire
from quire.config.groups import ServerConfig
from quire.server.context import ServerContext
from quire.server.errors import json_response
from quire.server.openapi import answers
from quire.types.errors import EngineUnavailableError

READY = "ready"
# A server that drains or sleeps is healthy and must not be killed; it is only not ready for more requests.
ALIVE = frozenset({READY, "draining", "asleep", "paused", "changing"})


class Health(msgspec.Struct):
    status: str
    detail: str


class Version(msgspec.Struct):
    version: str


class EngineSummary(msgspec.Struct):
    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int


class ServerInfo(msgspec.Struct):
    version: str
    status: str
    engine: EngineSummary | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    settings: dict[str, bool | int | float | str]


def harmless_settings(config: ServerConfig) -> dict[str, Any]:
    """Settings that are numbers, booleans or one of a few words: none can hold a key, a path or an address."""
    hints = get_type_hints(type(config))
    return {
        name: getattr(config, name)
        for name, hint in hints.items()
        if hint in (bool, int, float) or get_origin(hint) is Literal
    }


def admin_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Server"])

    def report(good: frozenset[str]) -> Response:
        health = context.provider.health()
        return json_response(Health(health.status, health.detail), 200 if health.status in good else 503)

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while steps are being finished or nobody waits; 503 while the engine starts, restarts or stalls."""
        return report(ALIVE)

    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response, include_in_schema=False)
    async def ping() -> Response:
        """The same as /health, under the name that some platforms ask for."""
        return report(ALIVE)

    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 when requests are taken; a load balancer should send none while it is 503."""
        return report(frozenset({READY}))

    @router.get("/version", response_class=Response)
    async def version() -> Response:
        """Quire's version."""
        return json_response(Version(quire.__version__))

    @router.get("/server_info", response_class=Response, responses=answers(ServerInfo))
    async def server_info() -> Response:
        """What runs here and how it is set up. Never shows keys, paths or the environment."""
        try:
            engine = msgspec.convert(context.provider.engine.info, EngineSummary, from_attributes=True)
        except EngineUnavailableError:
            engine = None
        formats = context.formats
        status, settings = context.provider.health().status, harmless_settings(context.settings)
        info = ServerInfo(quire.__version__, status, engine, formats.tool, formats.reasoning, settings)
        return json_response(info)

    @router.head("/", response_class=Response, include_in_schema=False)
    async def head() -> Response:
        return Response()

    return router
