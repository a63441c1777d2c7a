"""Dispatcher: hands each request to the application of the model that it names, once that model is in memory.

Plain ASGI, inside keys and limits: a body is read once here, and again by the application.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from urllib.parse import parse_qs

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.access import ROUTES, route_path
from quire.server.context import LATEST
from quire.server.errors import UnknownModelError, error_response, failure_of, http_failure
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.member import ServedModel
from quire.server.sse import while_connected
from quire.types.errors import QuireError

OWN_ROUTES = frozenset(
    {
        *(("GET", path) for path in ("/v1/models", "/api/tags", "/api/ps", "/metrics", "/load")),
        *(("GET", path) for path in ("/health", "/ready", "/ping")),
        ("POST", "/ping"),
    }
)
"""What is answered for all models together."""
# What needs an engine, asleep or not: the length of its context, and what its grammars may be.
_NEEDS_ENGINE = frozenset(
    {
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/load_lora_adapter"),
        *("/v1/chat/completions/render", "/v1/completions/render"),
    }
)
_NEEDS_NONE = frozenset({"/tokenize", "/detokenize", "/api/show", "/v1/unload_lora_adapter"})
_RESPONSES, _MODELS = "/v1/responses/", "/v1/models/"


class _Named(msgspec.Struct):
    """The fields of a body that say which model is meant."""

    model: object = None
    name: object = None  # what Ollama's older clients call it
    lora_name: object = None


class Dispatcher:
    def __init__(self, app: ASGIApp, fleet: Fleet, models: Mapping[str, ServedModel]) -> None:
        """`app` answers what is for all models; the first of `models` gets what names none."""
        self.app = app
        self._fleet = fleet
        self._models = models
        self._first = next(iter(models.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], route_path(scope)) in OWN_ROUTES:
            await self.app(scope, receive, send)
            return
        try:
            await self._dispatch(scope, receive, send)
        except QuireError as error:
            await error_response(scope, failure_of(error))(scope, receive, send)
        except HTTPException as error:  # a body that is too large
            failure = http_failure(error.status_code, str(error.detail), error.headers)
            await error_response(scope, failure)(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, access = route_path(scope), ROUTES.get((scope["method"], route_path(scope)))
        if path.startswith(_RESPONSES) and (access is None or not access.body):
            await self._find_response(scope, receive, send)
            return
        if access is None or not access.body:
            name = path.removeprefix(_MODELS) if path.startswith(_MODELS) else _query_model(scope)
            model = self._model_of(name, path)
            _note(scope, model)
            await model.app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:  # the client went away
            return
        model = self._model_of(_body_model(body, path), path)
        _note(scope, model)
        async with AsyncExitStack() as stack:
            if path not in _NEEDS_NONE and not (path in _NEEDS_ENGINE and self._fleet.is_loaded(model.name)):
                await while_connected(receive, stack.enter_async_context(self._fleet.using(model.name)))
            await model.app(scope, _again(body, receive), send)

    def _model_of(self, name: str | None, path: str) -> ServedModel:
        """The model that a name stands for. UnknownModelError with all names if there is none."""
        if name is None:
            return self._first
        wanted = [name, name.removesuffix(LATEST)]
        for each in wanted:
            for model in self._models.values():
                if each in model.context.served_names:
                    return model
        raise UnknownModelError(name, served_names(self._models))

    async def _find_response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask each model in turn for a response that was stored; the last one's 404 is the answer."""
        body = await _read(receive)
        if body is None:
            return
        *others, last = self._models.values()
        for model in others:
            attempt = _Attempt(send)
            _note(scope, model)
            await model.app(dict(scope), _again(body, receive), attempt)
            if not attempt.was_missing:
                return
        _note(scope, last)
        await last.app(scope, _again(body, receive), send)


class _Attempt:
    """Passes an answer on, unless it is a 404."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.was_missing = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.was_missing = message["status"] == 404
        if not self.was_missing:
            await self._send(message)


class NamesOfOthers:
    """The names that models have, but one of them; they come and go with adapters."""

    def __init__(self, models: Mapping[str, ServedModel], name: str) -> None:
        self._models, self._name = models, name

    def __contains__(self, name: object) -> bool:
        return any(name in model.context.served_names for model in self._models.values() if model.name != self._name)


def served_names(models: Mapping[str, ServedModel]) -> list[str]:
    return [name for model in models.values() for name in model.context.served_names]


def _note(scope: Scope, model: ServedModel) -> None:
    scope["state"]["observer"] = model.observer


def _query_model(scope: Scope) -> str | None:
    found = parse_qs(scope["query_string"].decode("latin-1")).get("model")
    return None if found is None else found[0]


def _body_model(body: bytes, path: str) -> str | None:
    """The model that a body names; None if it names none, or is no body that any route takes."""
    try:
        named = msgspec.json.decode(body, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    candidates = [named.model]
    if path == "/api/show":
        candidates.append(named.name)
    if path == "/v1/unload_lora_adapter":
        candidates.append(named.lora_name)
    return next((each for each in candidates if isinstance(each, str)), None)


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if the client went away before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """What an application receives of a body that was read already."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_again() -> Message:
        message = next(messages, None)
        return await receive() if message is None else message

    return receive_again
