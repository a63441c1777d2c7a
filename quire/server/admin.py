"""Routes about the server itself: is it alive, is it ready, what is it."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import quire
from quire.server.context import ServerContext
from quire.server.errors import json_response

READY = "ready"
# A server that finishes its last requests is well, and should not be killed for it; it is only not ready for more.
ALIVE = frozenset({READY, "draining"})


class Health(msgspec.Struct):
    status: str
    detail: str


class Version(msgspec.Struct):
    version: str


def admin_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Server"])

    def report(good: frozenset[str]) -> Response:
        health = context.provider.health()
        body = msgspec.json.encode(Health(health.status, health.detail))
        return json_response(body, 200 if health.status in good else 503)

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
        return json_response(msgspec.json.encode(Version(quire.__version__)))

    @router.head("/", response_class=Response, include_in_schema=False)
    async def head() -> Response:
        return Response()

    return router
