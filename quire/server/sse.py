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

from quire.server.errors import BUG_MESSAGE, ClientDisconnectedError, failure_of, openai_error
from quire.types.errors import QuireError
from quire.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
ACCEPTED = b""
"""What a generator of events yields first: the engine has the request, and has said nothing yet."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

# Seconds that the engine has to refuse a request with a status of its own. Without a word it has accepted.
VERDICT_SECONDS = 1.0
# Seconds of silence before a keep-alive, twice that at most. Clients and proxies wait for 30 to 300 seconds.
KEEP_ALIVE_SECONDS = 5.0


def event(data: bytes) -> bytes:
    """One event. JSON holds no raw line breaks, so one data line is enough."""
    return b"data: %b\n\n" % data


def named_event(name: str, data: bytes) -> bytes:
    """One event of a kind that clients may listen for by name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStream(Response):
    """Sends the events of a generator as they come, and keep-alives while none come.

    Headers wait for the first event, but no longer than VERDICT_SECONDS after the generator's ACCEPTED: what fails
    before is answered with a status of its own. What fails later is the stream's last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        opening: Callable[[], bytes] = lambda: KEEP_ALIVE,
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
        failed: Callable[[QuireError], bytes] = lambda error: event(openai_error(failure_of(error))),
        end: bytes = DONE,
        media_type: str | None = None,
    ) -> None:
        """What an API says apart from the events themselves.

        `opening` comes before the first event where that takes long, `keep_alive` whenever the stream is silent,
        `failed` tells of an error, and `end` closes the stream. `media_type` is that of other lines than
        events.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._opening = opening
        self._keep_alive = keep_alive
        self._failed = failed
        self._end = end
        self._has_begun = False
        self._is_silent = True
        self._sending = asyncio.Lock()
        self.has_failed = False
        """Whether the stream has ended with an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_events(send))
        except ClientDisconnectedError:
            if not self._has_begun:
                raise
            scope["state"]["client_gone"] = True  # for the access log; the status has been sent

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            accepted = await anext(events)
            assert accepted == ACCEPTED, "a generator of events says first that its request was accepted"
            keeper = asyncio.create_task(self._break_silence(send))
            try:
                async for data in events:
                    await self._send(send, data)
            except QuireError as error:
                if not self._has_begun:
                    raise
                logger.warning("a stream ended with an error: %s", error)
                await self._send_failure(send, error)
            except Exception:
                if self._has_begun:
                    await self._send_failure(send, QuireError(BUG_MESSAGE))
                raise
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
            await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _send_failure(self, send: Send, error: QuireError) -> None:
        self.has_failed = True
        await self._send(send, self._failed(error))

    async def _send(self, send: Send, data: bytes) -> None:
        """Send data, after the headers if it is the first."""
        async with self._sending:
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._is_silent = False
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _break_silence(self, send: Send) -> None:
        """Begin the stream if nothing else has, and send a keep-alive whenever it has been silent for long."""
        await asyncio.sleep(VERDICT_SECONDS)
        if not self._has_begun:
            await self._send(send, self._opening())
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._is_silent:
                await self._send(send, self._keep_alive())


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
