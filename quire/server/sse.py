"""Server-sent events: framing, and a response that ends its work when the client goes away.

Knows bytes and connections; what an event says is decided by the handlers. Backpressure is the HTTP server's `send`,
which waits while a slow reader's socket is full; meanwhile the engine's outputs merge in their mailbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ClientDisconnectedError, encode_error
from quire.types.errors import QuireError
from quire.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event. JSON holds no raw line breaks, so one data line is enough."""
    return b"data: %b\n\n" % data


def named_event(name: str, data: bytes) -> bytes:
    """One event of a kind that clients may listen for by name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStream(Response):
    """Sends the events of a generator as they come.

    Headers wait for the first event: what fails before it is answered with a status of its own. What fails later is
    the stream's last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        end: bytes = DONE,
        failed: Callable[[QuireError], bytes] = lambda error: event(encode_error(error)),
    ) -> None:
        """`end` closes the stream, and `failed` makes the event that tells of an error before it."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._failed = failed
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_events(send))
        except ClientDisconnectedError:
            if not self._has_begun:
                raise
            scope["state"]["client_gone"] = True  # for the access log; the status has been sent

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send(send, first)
            try:
                async for data in events:
                    await _send(send, data)
            except QuireError as error:
                logger.warning("a stream ended with an error: %s", error)
                await _send(send, self._failed(error))
            await send({"type": "http.response.body", "body": self._end, "more_body": False})


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but no longer than the client is there; it is cancelled when the client goes away.

    The request's body must have been read: the next message can then only be the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError("the client went away")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
