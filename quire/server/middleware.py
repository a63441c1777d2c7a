"""What happens to every request before and after its route: ids, the access log, API keys, limits on bodies.

Plain ASGI, so that a streamed chunk passes through without extra tasks or copies. No content is logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.server.access import PROBES, is_open, needs_admin, route_path
from quire.server.errors import STATUS_CLIENT_GONE, Failure, error_response, http_failure
from quire.server.metrics_route import http_end
from quire.utils.log import get_logger

logger = get_logger("quire.server.access")

REQUEST_ID_HEADER = "x-request-id"

# Nobody waits for the end of a body that is refused, so the connection cannot be used again.
_CLOSE = {"connection": "close"}
# But most clients read nothing until they have sent everything, and a connection that is closed meanwhile tells them
# nothing. So what they still send is read and dropped: this long, and this many times what a body may hold.
_DROP_SECONDS = 5.0
_DROP_FACTOR = 16
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")
_REQUEST_ID = re.compile(r"[\w.:/@+=-]{1,128}", re.ASCII)


def request_id_of(scope: Scope) -> str:
    """The id that RequestContext gave to this request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def owner_of(scope: Scope) -> str:
    """A digest of the API key that a request came with; "" where there are no keys."""
    owner: str = scope["state"].get("owner", "")
    return owner


def is_request_id(text: str) -> bool:
    """Whether a client's own id is fit for logs and headers."""
    return _REQUEST_ID.fullmatch(text) is not None


class RequestContext:
    """The outermost layer: gives each request an id, returns it as a header, and reports the request's end."""

    def __init__(self, app: ASGIApp, observer: Observer = NULL_OBSERVER) -> None:
        self.app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.monotonic()
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        own = not is_request_id(given)
        request_id = secrets.token_hex(12) if own else given
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["own_request_id"] = own
        state["arrival_time"] = begin
        state["owner"] = ""
        header = (REQUEST_ID_HEADER.encode(), request_id.encode())
        status = STATUS_CLIENT_GONE
        told = False

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                gone = state.get("client_gone", False)
                self._tell(scope, STATUS_CLIENT_GONE if gone else status, time.monotonic() - begin)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                tell()  # before the client has all of its answer: what it asks next counts this request
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            status = 500  # the answer is sent further out, where the error is logged
            raise
        finally:
            tell()

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        method, path, request_id = scope["method"], scope["path"], request_id_of(scope)
        observer: Observer = scope["state"].get("observer", self._observer)  # the model's, where there are several
        observer.on_http_end(http_end(scope, status, seconds))
        level = logging.DEBUG if route_path(scope) in PROBES else logging.INFO  # probes come every few seconds
        fields = {"method": method, "path": path, "status": status, "seconds": seconds, "request_id": request_id}
        logger.log(
            level, "%s %r %d in %.3f s, id %s", method, path, status, seconds, request_id, extra={"fields": fields}
        )


class ApiKeys:
    """Accepts requests with one of the keys; without keys, all. Those of the operator need an admin key."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], protect_health: bool = False, admin_keys: Sequence[str] = ()
    ) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]
        self._admin_digests = [_digest(key) for key in admin_keys]
        self._protect_health = protect_health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._failure(scope) if scope["type"] == "http" else None
        if failure is not None:
            await error_response(scope, failure)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _failure(self, scope: Scope) -> Failure | None:
        headers = {"www-authenticate": "Bearer"}
        if needs_admin(scope):
            if not self._admin_digests:
                words = "this is the operator's, and there is no admin key; start the server with --admin-key-file"
                return http_failure(403, words)
            if not _matches(scope, self._admin_digests):
                return http_failure(
                    401, "the admin key is missing or wrong; send it as `Authorization: Bearer KEY`", headers
                )
            return None
        if not self._digests or is_open(scope, self._protect_health):
            return None
        matches = _matches(scope, self._digests)
        if not matches:
            return http_failure(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
                headers,
            )
        scope["state"]["owner"] = matches[0].hex()[:32]
        return None


def _matches(scope: Scope, digests: Sequence[bytes]) -> list[bytes]:
    """The digests of keys that a request has."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    candidates = [key.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # Every key is compared, each in constant time, so that the time taken tells nothing about them.
    return [
        digest for candidate in candidates for digest in digests if hmac.compare_digest(_digest(candidate), digest)
    ]


class SameSite:
    """Refuses what a web page of another origin sends, and pages that reach this server under a name of their own.

    The latter is DNS rebinding: a page's own name, made to point here, so that the browser takes this server for the
    page's. Browsers hide answers to reads from other origins by themselves.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None, origins: Sequence[str] = ()) -> None:
        """`hosts`: names that are ours, besides those that no stranger can have; None: any, for a key protects it."""
        self.app = app
        self._hosts = None if hosts is None else frozenset({*map(str.lower, hosts), *_own_names()})
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._why_not(scope) if scope["type"] == "http" else None
        if why is None:
            await self.app(scope, receive, send)
        else:
            await error_response(scope, http_failure(403, why))(scope, receive, send)

    def _why_not(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return (
                f"this server does not answer to the name {host[:100]!r}; start it with --allowed-hosts NAME,"
                " or with an API key"
            )
        if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return None
        if origin.partition("://")[2] == host or not self._origins.isdisjoint({origin, "*"}):
            return None
        return f"pages of {origin[:100]!r} may not send this; start the server with --allowed-origins ORIGIN"

    def _is_ours(self, host: str) -> bool:
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        name = name.lower().rstrip(".")
        if "." not in name or name.startswith("[") or name.endswith(".localhost") or _IPV4.fullmatch(name):
            return True  # an address, a machine's bare name, or no name at all: no domain of a stranger
        return self._hosts is None or name in self._hosts or "*" in self._hosts


class BodyLimits:
    """Refuses bodies that are too large, before they are held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_bytes = 0

        async def receive_within() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body", False):
                    await self._drop_rest(receive)
                raise HTTPException(413, self._too_large(), dict(_CLOSE))
            return message

        await self.app(scope, receive_within, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once, but leave the connection open for as long as the rest of the body is dropped."""

        async def send_open(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        response = error_response(scope, http_failure(413, self._too_large(), _CLOSE))
        await response(scope, receive, send_open)
        await self._drop_rest(receive)
        await send({"type": "http.response.body"})

    async def _drop_rest(self, receive: Receive) -> None:
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DROP_SECONDS):
                while num_bytes < _DROP_FACTOR * self._max_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):  # the end of the body, or of the connection
                        return

    def _too_large(self) -> str:
        return f"the body is larger than the {self._max_bytes} bytes that this server takes (--max-body-bytes)"


def _own_names() -> set[str]:
    """The machine's own names; asked of nobody else, so it does not wait for a name server."""
    name = socket.gethostname().lower()
    return {name, f"{name.partition('.')[0]}.local"}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
