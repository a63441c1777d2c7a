"""The admin surface: an ASGI application on its own socket, with its own key. Knows verbs, not what they do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.control.verbs import VERBS, AdminVerb, Controlled
from quire.server.errors import UnknownModelError, failure_of
from quire.types.errors import QuireError, RequestError, UnknownNameError
from quire.utils.log import get_logger

logger = get_logger(__name__)


class VerbInfo(msgspec.Struct):
    verb: str
    summary: str
    access: str


class Failure(msgspec.Struct):
    error: str


def build_admin_app(servers: Controlled | Mapping[str, Controlled], keys: Sequence[str] = ()) -> Starlette:
    """Without keys, whoever may open the socket may use it; that is for Unix sockets alone.

    Of several models, by their names, the query's `model` says which is meant; verbs that read take all without it.
    """
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def answer(request: Request) -> Response:
        refused = _refusal(request, digests)
        if refused is not None:
            return refused
        name = request.path_params.get("verb")
        if name is None:
            return _json([VerbInfo(verb, VERBS.get(verb).summary, VERBS.get(verb).access) for verb in VERBS])
        try:
            verb = VERBS.get(name)
        except UnknownNameError as error:
            return _json(Failure(str(error)), 404)
        if request.method == "GET" and verb.access != "reads":
            return _json(Failure(f"{name!r} changes the server; use POST"), 405)
        body = await _body(request, verb.max_body)
        if body is None:
            return _json(Failure(f"the body has more than {verb.max_body} bytes"), 413)
        try:
            argument = None if verb.argument is None else msgspec.json.decode(body, type=verb.argument)
        except msgspec.MsgspecError as error:
            return _json(Failure(f"the argument of {name!r} is wrong: {error}"), 400)
        model = request.query_params.get("model")
        logger.info("admin: %s%s", name, "" if model is None else f" of {model[:100]!r}")
        try:
            if model is None and verb.access == "reads" and not isinstance(servers, Controlled):
                return _json({each: await _read(verb, server, argument) for each, server in servers.items()})
            return _json(await verb.run(_one(servers, model), argument))
        except QuireError as error:
            logger.error("admin: %s failed: %s", name, error)
            return _json(Failure(str(error)), failure_of(error).status if isinstance(error, RequestError) else 409)

    return Starlette(
        routes=[
            Route("/admin", answer, methods=["GET"]),
            Route("/admin/{verb}", answer, methods=["GET", "POST"]),
        ]
    )


def _one(servers: Controlled | Mapping[str, Controlled], model: str | None) -> Controlled:
    """The server that is meant, by the model's first name."""
    if isinstance(servers, Controlled):
        if model is not None:
            raise RequestError("this server has one model; leave --model out", "model")
        return servers
    if model is None:
        raise RequestError(f"this server has several models; say which with --model: {', '.join(servers)}", "model")
    if model not in servers:
        raise UnknownModelError(model, list(servers))
    return servers[model]


async def _read(verb: AdminVerb, server: Controlled, argument: Any) -> Any:
    """What a verb says of one model of several, or why it says nothing."""
    try:
        return await verb.run(server, argument)
    except QuireError as error:
        return Failure(str(error))


def _refusal(request: Request, digests: Sequence[bytes]) -> Response | None:
    if "origin" in request.headers:
        return _json(Failure("web pages may not use the admin surface"), 403)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = hashlib.sha256(key.strip().encode()).digest() if scheme.lower() == "bearer" else b""
    if digests and not sum(hmac.compare_digest(given, digest) for digest in digests):
        return _json(Failure("the admin key is missing or wrong; send it as a bearer token"), 401)
    return None


async def _body(request: Request, limit: int) -> bytes | None:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
