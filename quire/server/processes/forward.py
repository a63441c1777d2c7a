"""What one API process cannot answer alone goes to the process that can, over Unix sockets that only we may open.

A stored response is found by asking: whoever does not have it asks the others before it says 404. A request with an
Idempotency-Key belongs to one process by its key. Metrics, the console and the load are the parent's.
"""

from __future__ import annotations

import asyncio
import hmac
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httptools
from fastapi import APIRouter, HTTPException
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.metrics.stats import NULL_OBSERVER
from quire.server.access import route_path
from quire.server.errors import ClientDisconnectedError, error_response, failure_of, http_failure
from quire.server.keyed import HEADER as KEY_HEADER
from quire.server.middleware import REQUEST_ID_HEADER, request_id_of
from quire.server.sse import while_connected
from quire.types.errors import EngineUnavailableError

PROCESS_HEADER = "x-api-process"
"""Of every answer: which process made it, from 0."""
PARENT = "parent"
_HOP_HEADER = "x-quire-hop"
_RESPONSES = "/v1/responses"
_LOAD = "/load"
_ONE_PROCESS = {
    "/v1/load_lora_adapter": "adapters that come and go",
    "/v1/unload_lora_adapter": "adapters that come and go",
}
# What a connection says of itself, and what the outer layers of the first process say again.
_NOT_SENT = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect"})
_NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"vary", b"x-request-id"})


class _Reader:
    """Turns the bytes of an answer into ASGI messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.is_done = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> list[Message]:
        self._parser.feed_data(data)
        found, self.messages = self.messages, []
        return found

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        kept = [
            (name, value)
            for name, value in self._headers
            if name not in _NOT_RETURNED and not name.startswith(b"access-control-")
        ]
        status = self._parser.get_status_code()
        self.messages.append({"type": "http.response.start", "status": status, "headers": kept})

    def on_body(self, data: bytes) -> None:
        self.messages.append({"type": "http.response.body", "body": data, "more_body": True})

    def on_message_complete(self) -> None:
        self.is_done = True
        self.messages.append({"type": "http.response.body", "body": b"", "more_body": False})


class _Searched(Exception):
    """The process that was asked does not have it."""


class Neighbours:
    """The sockets of the other processes, and how a request is sent to them."""

    def __init__(self, folder: str, secret: str) -> None:
        self._folder = Path(folder)
        self._secret = secret

    def socket_path(self, name: str) -> str:
        return str(self._folder / name)

    def stage(self, headers: Headers) -> str:
        """Why a request was forwarded to this process; "": it came from a client."""
        secret, _, stage = headers.get(_HOP_HEADER, "").partition(":")
        return stage if hmac.compare_digest(secret.encode(), self._secret.encode()) else ""

    async def forward(
        self, name: str, scope: Scope, body: bytes, send: Send, stage: str, *, but_404: bool = False
    ) -> None:
        """Have another process answer; OSError if it is not there before it has begun to.

        With `but_404` an answer of that status is not sent, and _Searched raised.
        """
        reader, writer = await asyncio.open_unix_connection(self.socket_path(name))
        try:
            writer.write(self._head(scope, body, stage) + body)
            await writer.drain()
            answer = _Reader()
            while not answer.is_done:
                data = await reader.read(1 << 16)
                if not data:
                    raise ConnectionError("the API process that answers has ended")
                for message in answer.feed(data):
                    if but_404 and message.get("status") == 404:
                        raise _Searched
                    await send(message)
        finally:
            writer.close()

    def _head(self, scope: Scope, body: bytes, stage: str) -> bytes:
        sent = scope["raw_path"].removeprefix(scope.get("root_path", "").encode())  # which uvicorn puts before it
        target = sent + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        own = {REQUEST_ID_HEADER.encode(), _HOP_HEADER.encode()}
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT and name not in own]
        headers += [
            (REQUEST_ID_HEADER.encode(), request_id_of(scope).encode()),
            (_HOP_HEADER.encode(), f"{self._secret}:{stage}".encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", *(b": ".join(pair) for pair in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class Forwarding:
    """Around the routes of one API process, inside of keys and limits: the others check them again."""

    def __init__(self, app: ASGIApp, neighbours: Neighbours, index: int, num_processes: int) -> None:
        self.app = app
        self._neighbours = neighbours
        self._index = index
        self._others = [str(other) for other in range(num_processes) if other != index]
        self._num_processes = num_processes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), route_path(scope)
        stage = self._neighbours.stage(headers)
        if stage:
            scope["state"]["observer"] = NULL_OBSERVER  # the process that the client knows counts it
        send = self._naming(send)
        if (what := _ONE_PROCESS.get(path)) is not None:
            words = f"{what} need --api-server-count 1; this server has {self._num_processes} API processes"
            await error_response(scope, http_failure(400, words))(scope, receive, send)
        elif path == _LOAD:
            await self._forward(PARENT, scope, receive, send, "load")
        elif not stage and scope["method"] == "POST" and (owner := self._owner(headers)) != self._index:
            await self._forward(str(owner), scope, receive, send, "key")
        elif path.startswith(_RESPONSES) and stage != "search":
            await self._search(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _owner(self, headers: Headers) -> int:
        key = headers.get(KEY_HEADER)
        return self._index if key is None else zlib.crc32(key.encode()) % self._num_processes

    def _naming(self, send: Send) -> Send:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = any(name == PROCESS_HEADER.encode() for name, _ in message["headers"])
                own = [] if known else [(PROCESS_HEADER.encode(), str(self._index).encode())]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        return send_named

    async def _forward(self, name: str, scope: Scope, receive: Receive, send: Send, stage: str) -> None:
        try:
            body = await read_body(receive)
        except HTTPException as error:  # the body is too large
            await error_response(scope, http_failure(error.status_code, str(error.detail)))(scope, receive, send)
            return
        await deliver(self._neighbours, name, scope, body, receive, send, stage)

    async def _search(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer here; if that is a 404, ask the others, and say it if all of them do."""
        body, has_all = bytearray(), False
        held: list[Message] = []

        async def receive_noting() -> Message:
            nonlocal has_all
            message = await receive()
            body.extend(message.get("body", b""))
            has_all = has_all or not message.get("more_body", False)
            return message

        async def send_unless_404(message: Message) -> None:
            if held or (message["type"] == "http.response.start" and message["status"] == 404):
                held.append(message)
            else:
                await send(message)

        await self.app(scope, receive_noting, send_unless_404)
        if not held:
            return
        if not has_all:
            body += await read_body(receive)
        try:
            if not await while_connected(receive, self._ask_others(scope, bytes(body), send)):
                for message in held:
                    await send(message)
        except ClientDisconnectedError:
            scope["state"]["client_gone"] = True

    async def _ask_others(self, scope: Scope, body: bytes, send: Send) -> bool:
        for name in self._others:
            try:
                await self._neighbours.forward(name, scope, body, send, "search", but_404=True)
            except (_Searched, OSError):
                continue
            return True
        return False


async def read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body.extend(message.get("body", b""))
        if not message.get("more_body", False):
            return bytes(body)


async def deliver(
    neighbours: Neighbours, name: str, scope: Scope, body: bytes, receive: Receive, send: Send, stage: str
) -> None:
    """Send the answer of another process, or 503 if it is not there; ends with the client."""
    has_begun = False

    async def send_noting(message: Message) -> None:
        nonlocal has_begun
        has_begun = True
        await send(message)

    try:
        await while_connected(receive, neighbours.forward(name, scope, body, send_noting, stage))
    except ClientDisconnectedError:
        scope["state"]["client_gone"] = True
    except OSError as error:
        if has_begun:
            raise
        gone = EngineUnavailableError(f"the process that has to answer this is not there: {error}", 2.0)
        await error_response(scope, failure_of(gone))(scope, receive, send)


class _FromParent(Response):
    """The answer of the parent to the same request."""

    def __init__(self, neighbours: Neighbours) -> None:
        super().__init__()
        self._neighbours = neighbours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await deliver(self._neighbours, PARENT, scope, await read_body(receive), receive, send, PARENT)


def parent_router(neighbours: Neighbours, paths: Sequence[str]) -> APIRouter:
    """Routes that the parent answers."""
    router = APIRouter(tags=["Server"])

    async def answer() -> Any:
        return _FromParent(neighbours)

    for path in paths:
        router.add_api_route(path, answer, methods=["GET"], response_class=Response, summary="For the whole server")
    return router
