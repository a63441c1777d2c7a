"""HTTP connections: limits on headers, a deadline for requests that never become complete, and half-closed sockets.

On top of uvicorn's protocol over httptools, which has none of these.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import time
from functools import partial
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quire.server.errors import Failure, openai_error
from quire.utils.log import get_logger

logger = get_logger(__name__)

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
# Most clients read nothing until they have sent everything: what they still send is read and dropped, within bounds.
_DROP_SECONDS = 2.0
_MAX_DROPPED = 64 << 20
_LEAST_BODY_RATE = 500  # bytes a second, as web servers ask for
_FIRST_LOOK, _LOOK_INTERVAL = 0.02, 0.5  # seconds
_FEW_FILES_LEFT = 8  # of those that the process may open
_WARN_INTERVAL = 60.0  # seconds
_Phase = Literal["idle", "head", "body"]
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class OpenFiles:
    """Warns when this process may open hardly any more files: connections that come then are dropped unseen."""

    def __init__(self) -> None:
        self._warned_at = -_WARN_INTERVAL

    def look(self, transport: asyncio.Transport) -> None:
        """The system gives the lowest number that is free: a high one says how many are taken."""
        number = transport.get_extra_info("socket").fileno()
        limit, now = resource.getrlimit(resource.RLIMIT_NOFILE)[0], time.monotonic()
        if 0 <= limit - _FEW_FILES_LEFT <= number and now - self._warned_at >= _WARN_INTERVAL:
            self._warned_at = now
            logger.warning(
                "a connection is file %d of the %d that this process may open; more are dropped: raise `ulimit -n`",
                number + 1,
                limit,
            )


_OPEN_FILES = OpenFiles()


class _HeadersTooLargeError(Exception):
    """Raised inside the parser, which stops at it."""


class Connection(HttpToolsProtocol):
    """One connection. What is refused here has not reached the application."""

    def __init__(self, *args: Any, header_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout = header_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._phase: _Phase = "idle"
        self._num_header_bytes = 0  # of headers that are complete
        self._num_bytes_in_head = 0  # that came while they were not
        self._num_headers = 0
        self._num_body_bytes = 0  # since the deadline was set
        self._is_refused = False
        self._num_dropped = 0
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _OPEN_FILES.look(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_dropped += len(data)
            if self._num_dropped > _MAX_DROPPED:
                self.transport.abort()
            return
        phase = self._phase
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._phase == "body":
            self._wait_for_body(len(data))
        elif self._phase == "head" and phase == "head":
            # The parser tells of a header only when it is complete.
            self._num_bytes_in_head += len(data)
            if self._is_too_large():
                self._refuse_headers()

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = "head"
        self._num_header_bytes = self._num_bytes_in_head = self._num_headers = 0
        if self._deadline is None:
            self._set_deadline()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = "body"
        self._clear_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = "idle"
        self._clear_deadline()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._is_too_large():
            raise _HeadersTooLargeError

    def _is_too_large(self) -> bool:
        num_bytes = max(self._num_header_bytes, self._num_bytes_in_head)
        return num_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS

    # Refusals

    def send_400_response(self, msg: str) -> None:
        """What the parser stopped at: something that is not HTTP, or headers that are too large."""
        if self._is_too_large():
            self._refuse_headers()
        else:
            self._refuse(400, "this is no HTTP request that the server understands", "bad_request")

    def _refuse_headers(self) -> None:
        self._refuse(
            431,
            f"the headers are larger than the {MAX_HEADER_BYTES} bytes, or more than the {MAX_HEADERS} fields, that"
            " this server takes; send less",
            "headers_too_large",
        )

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer, where no other answer is on its way, and close when the client has stopped sending."""
        self._is_refused = True
        self._clear_deadline()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = openai_error(Failure(status=status, message=message, code=code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_DROP_SECONDS, self.transport.close)

    # Requests that are never complete

    def _set_deadline(self) -> None:
        if self._header_timeout > 0:
            self._deadline = self.loop.call_later(self._header_timeout, self._give_up)
            self._num_body_bytes = 0

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_body(self, num_bytes: int) -> None:
        """A body may take long, as long as each timeout brings enough of it."""
        self._num_body_bytes += num_bytes
        is_waiting = self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete
        if is_waiting and self._deadline is not None and not self._is_fast_enough():
            return
        self._clear_deadline()
        if is_waiting:
            self._set_deadline()

    def _is_fast_enough(self) -> bool:
        return self._num_body_bytes >= _LEAST_BODY_RATE * self._header_timeout

    def _give_up(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self._is_refused:
            return
        if self._phase == "head":
            self._refuse(408, f"no complete request came within {self._header_timeout:g} s", "request_timeout")
        elif self._phase == "body" and self.flow.read_paused:  # the server itself has paused reading
            self._set_deadline()
        else:
            self.transport.close()  # an application that waits for the body gets a disconnect

    # Half-closed sockets

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has closed only its sending side."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False  # the connection is closed; event loops cannot keep one half of TLS open
        cycle.keep_alive = False
        # A socket that is closed in both directions looks the same, until something is sent: then the client resets
        # the connection. An interim response may be sent before any answer.
        if not cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM)
        self._look = self.loop.call_later(_FIRST_LOOK, self._look_for_client)
        return True

    def _look_for_client(self) -> None:
        if self.transport.is_closing():
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(_LOOK_INTERVAL, self._look_for_client)


def _is_reset(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection in both directions."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def make_connection(header_timeout: float) -> Any:
    """What uvicorn makes its connections with."""
    return partial(Connection, header_timeout=header_timeout)
