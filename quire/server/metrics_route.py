"""GET /metrics, and the metrics event of an HTTP request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from quire.metrics.prometheus import PrometheusObserver
from quire.metrics.stats import HttpEnd

NO_ROUTE = "none"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


async def _counted() -> None:
    """All events have been heard."""


def make_metrics_router(
    prometheus: PrometheusObserver, before: Callable[[], Awaitable[None]] = _counted
) -> APIRouter:
    """`before` is awaited ahead of each scrape, to hear of events that others have counted."""
    router = APIRouter(tags=["Server"])

    # Async, so that it runs on the event loop that counts: nothing changes while it reads.
    @router.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def metrics(request: Request) -> Response:
        await before()
        body, content_type = prometheus.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router


def http_end(scope: Scope, status: int, seconds: float) -> HttpEnd:
    """The event for a finished request. Nothing that clients choose freely becomes a label."""
    route = scope.get("route")
    path = route.path_format if isinstance(route, Route) else NO_ROUTE
    method = scope["method"] if scope["method"] in _METHODS else "other"
    return HttpEnd(method, path, status, seconds)
