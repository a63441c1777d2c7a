"""GET /console/events: the console's stream, as lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.console.feed import ConsoleFeed
from quire.server.errors import ClientDisconnectedError
from quire.server.sse import while_connected


class LineStream(Response):
    """Sends lines as they come, and ends its work when the client goes away."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass  # the body, which says nothing; what comes after it is the disconnect
        try:
            await while_connected(receive, self._send_lines(send))
        except ClientDisconnectedError:
            scope["state"]["client_gone"] = True

    async def _send_lines(self, send: Send) -> None:
        async with aclosing(self._lines) as lines:
            first = await anext(lines)  # what is refused is refused here, with a status of its own
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def console_router(feed: ConsoleFeed) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.get("/console/events", response_class=Response, summary="What the console shows, as lines of JSON")
    async def events() -> Response:
        """A line about the server, then a frame twice a second; docs/reference/console-events.md has the fields."""
        return LineStream(feed.lines())

    return router
