"""Reads JSON bodies quickly and within bounds, so that no body holds up the streams that share the event loop.

Large bodies are read on a thread. Nesting depth and number of values are counted in the bytes
before anything is decoded.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from quire.server.errors import BodyError, ClientDisconnectedError
from quire.types.errors import RequestError

MAX_DEPTH = 256  # of lists and objects; a schema needs two levels for each of its own
MAX_VALUES = 1 << 20
MAX_CONTAINERS = 1 << 16  # lists and objects
# Checking and converting one item takes tens of microseconds, during which the event loop is blocked.
MAX_ITEMS = {"messages": 4096, "input": 4096, "prompt": 4096, "tools": 1024, "documents": 4096, "logit_bias": 1 << 16}
MAX_TEXTS = {"input": 1 << 17, "documents": 1 << 17}  # where all items are plain texts, which cost next to nothing
_LARGE = 1 << 16  # bytes
_PIECE = 1 << 20
_QUOTE = ord('"')
# For each byte: how it changes the depth, and whether a value follows it.
_DEPTHS = np.zeros(256, np.int8)
_DEPTHS[[ord("["), ord("{")]] = 1
_DEPTHS[[ord("]"), ord("}")]] = -1
_BEGINS = np.zeros(256, np.bool_)
_BEGINS[[ord("["), ord("{"), ord(",")]] = True

_LONGEST_NAME = 200


class JsonRequest(Request):
    """Decodes with msgspec, several times as fast as the standard library."""

    _value: Any = None
    _is_loaded = False

    async def load(self) -> None:
        """Read the body, and refuse one that holds too much."""
        try:
            body = await self.body()
        except ClientDisconnect as error:
            raise ClientDisconnectedError("the client went away") from error
        self._value = await asyncio.to_thread(_read, body) if len(body) > _LARGE else _read(body)
        self._is_loaded = True
        if isinstance(self._value, dict):
            for name, most in MAX_ITEMS.items():
                _check_count(name, self._value.get(name), most)

    async def json(self) -> Any:
        if not self._is_loaded:
            await self.load()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def _check_count(name: str, value: Any, most: int) -> None:
    """Refuse a list with too many items and parts of messages. Token ids are cheap and not counted."""
    if not isinstance(value, list | dict) or not value or (isinstance(value, list) and isinstance(value[0], int)):
        return
    parts = [item["content"] for item in value if isinstance(item, dict) and isinstance(item.get("content"), list)]
    count = len(value) + sum(map(len, parts))
    if count > most and name in MAX_TEXTS and all(isinstance(item, str) for item in value):
        most = MAX_TEXTS[name]
    if count > most:
        raise RequestError(f"{name} holds {count} items; this server takes at most {most}", name)


def _read(body: bytes) -> Any:
    """The body's value, or for FastAPI the error that says where it is not JSON."""
    try:
        check_size(body)
        return _decode(body)
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8 at byte {error.start}; send JSON in UTF-8") from error
    except RecursionError as error:
        raise BodyError(_TOO_DEEP) from error
    except ValueError as error:
        return error


_TOO_DEEP = "the body is nested too deeply; send flatter JSON"


def check_size(body: bytes) -> None:
    """Refuse a body that is nested too deeply or would become too many objects. Looks at structure, not at text."""
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH and body.count(b",") <= MAX_VALUES - MAX_DEPTH:
        return
    # Escapes go first, so that every quotation mark that is left begins or ends a text.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    depth = num_values = num_containers = 0
    inside = False
    for begin in range(0, len(plain), _PIECE):
        data = np.frombuffer(plain, np.uint8, min(_PIECE, len(plain) - begin), begin)
        quotes = np.logical_xor.accumulate(np.concatenate(([inside], data == _QUOTE)))[1:]
        inside = bool(quotes[-1])
        structure = data[~quotes]
        if not len(structure):
            continue
        steps = _DEPTHS[structure]
        depths = depth + np.cumsum(steps, dtype=np.int64)
        depth = int(depths[-1])
        num_values += int(np.count_nonzero(_BEGINS[structure]))
        num_containers += int(np.count_nonzero(steps > 0))
        if int(depths.max()) > MAX_DEPTH:
            raise BodyError(_TOO_DEEP)
        if num_values > MAX_VALUES:
            raise BodyError(f"the body holds more than {MAX_VALUES} values; send fewer")
        if num_containers > MAX_CONTAINERS:
            raise BodyError(f"the body holds more than {MAX_CONTAINERS} lists and objects; send fewer")


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The standard library has better error positions, and accepts infinite numbers and lone surrogates, which
        # msgspec and everything behind this refuse.
        value = _standard_decode(body)
        _check(value)
        return value


def _standard_decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BodyError("the body holds a number of too many digits; send a smaller one") from error


def _check(value: Any) -> None:
    """Refuse lone surrogates and numbers that are not finite, by the name of the first field that holds one."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, part = waiting.pop()
        if isinstance(part, dict):
            for key, inner in reversed(part.items()):
                inner_name = f"{name}.{key}" if name else key
                if _has_surrogate(key):
                    raise _surrogate(inner_name)
                waiting.append((inner_name, inner))
        elif isinstance(part, list):
            waiting += [(f"{name}[{index}]", inner) for index, inner in reversed([*enumerate(part)])]
        elif isinstance(part, str) and _has_surrogate(part):
            raise _surrogate(name)
        elif isinstance(part, float) and not math.isfinite(part):
            name = name[:_LONGEST_NAME]
            raise BodyError(f"{name or 'the body'} is {part}, which is no JSON number; send a finite one", name)


def _has_surrogate(text: str) -> bool:
    """Whether the text has a lone surrogate, which cannot be encoded."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _surrogate(name: str) -> BodyError:
    name = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()
    return BodyError(f"{name or 'the body'} has a lone surrogate; send valid Unicode", name)


class JsonRoute(APIRoute):
    """A route whose body, if it has one, is JSON by its content type too, and read by JsonRequest.

    A web page may send any other content type to any server without asking first, JSON it may not: so asking for JSON
    keeps strangers' pages from using a server on this machine. What a page sends without a body is refused by its
    origin (`SameSite` in quire/server/middleware.py).
    """

    any_type = False
    """Whether the content type may be any; pages of other origins are refused before they come here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body, any_type = self.body_field is not None, self.any_type

        async def handle_json(request: Request) -> Response:
            if has_body and any_type:
                request.scope["headers"] = _with_json_type(request.scope["headers"])
            elif has_body:
                _check_content_type(request)
            read = JsonRequest(request.scope, request.receive)
            if has_body:
                await read.load()
            return await handle(read)

        return handle_json


class AnyTypeRoute(JsonRoute):
    """For an API whose clients send JSON under any content type, or under none."""

    any_type = True


def _with_json_type(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers as of JSON, which is all that FastAPI reads a body as."""
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    return [*kept, (b"content-type", b"application/json")]


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(
            415, f"the content type is {kind[:60]!r}; send JSON with `Content-Type: application/json`"
        )
