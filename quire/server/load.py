"""How busy the server is: GET /load, and the header that load balancers ask for with any request (ORCA)."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.context import EngineProvider, ServerContext
from quire.server.errors import json_response
from quire.server.openapi import answers
from quire.types.errors import EngineUnavailableError

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"


class Load(msgspec.Struct):
    server_load: int
    """Completions that run or wait."""


def load_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.get("/load", response_class=Response, responses=answers(Load))
    async def load() -> Response:
        """How many completions run or wait."""
        return json_response(Load(context.admission.num_open))

    return router


class LoadReport:
    """Adds the engine's load to the answers of requests that ask for it."""

    def __init__(self, app: ASGIApp, provider: EngineProvider) -> None:
        self.app = app
        self._provider = provider

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = Headers(scope=scope).get(FORMAT_HEADER) if scope["type"] == "http" else None
        if wanted is None:
            await self.app(scope, receive, send)
            return

        async def send_with_report(message: Message) -> None:
            if message["type"] == "http.response.start":
                report = self._report(wanted)
                if report is not None:
                    message["headers"] = [*message["headers"], (REPORT_HEADER.encode(), report)]
            await send(message)

        await self.app(scope, receive, send_with_report)

    def _report(self, wanted: str) -> bytes | None:
        """In ORCA's text or JSON form, under vLLM's names; None for other forms, or while there is no engine."""
        try:
            stats = self._provider.engine.stats
        except EngineUnavailableError:
            return None
        named = {
            "kv_cache_usage_perc": stats.kv_cache_usage,
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
        }
        if wanted.upper() == "TEXT":
            return b"TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in named.items()).encode()
        if wanted.upper() == "JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
        return None
