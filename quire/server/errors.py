"""Every failure as a status, a code, a field, and the error form of the API that was called.

The one place where errors get their address: `addressed` names fields as a request does, `failure_of` says what an
error means to a client, and the rest puts that into OpenAI's, Anthropic's and Ollama's forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from quire.server.access import route_path
from quire.server.missing import missing_capability
from quire.server.validation import explain_validation
from quire.types.errors import ContextLengthError, EngineUnavailableError, QueueFullError, QuireError, RequestError

BUG_MESSAGE = "the server failed on this request; its log says why"
STATUS_CLIENT_GONE = 499  # nginx's status for it; only the log shows it

_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class BodyError(HTTPException):
    """A body that no endpoint can take; `field` names the part that is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(400, message)
        self.field = field


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


# Anthropic's names of the kinds of errors; every other 4xx is an invalid_request_error, every other 5xx an api_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorInfo(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicErrorInfo
    request_id: str | None = None


class OllamaErrorBody(msgspec.Struct):
    error: str


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"the model {name[:100]!r} does not exist; served here: {', '.join(served)}", "model")


class NotFoundError(RequestError):
    """The request names something that is not here, or not any more."""


class ToolServerError(QuireError):
    """A tool server that the operator named cannot be used."""


class ClientDisconnectedError(QuireError):
    """The client went away before its answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong, before it is put into the error form of an API."""

    status: int
    message: str
    field: str | None = None
    """The part of the request that is wrong."""
    code: str | None = None
    """What kind of failure it is, for programs; more than the status says."""
    headers: Mapping[str, str] | None = None
    anthropic_message: str | None = None
    """The words that Anthropic's clients look for, where they are others."""


_MEANINGS: tuple[tuple[type[QuireError], int, str | None], ...] = (
    (ClientDisconnectedError, STATUS_CLIENT_GONE, None),
    (UnknownModelError, 404, "model_not_found"),
    (NotFoundError, 404, "not_found"),
    (ContextLengthError, 400, "context_length_exceeded"),
    (RequestError, 400, None),
    (ToolServerError, 502, None),
    (QueueFullError, 503, "queue_full"),
    (EngineUnavailableError, 503, "engine_unavailable"),
    (QuireError, 500, None),
)


def failure_of(error: QuireError) -> Failure:
    """What an error means to a client."""
    status, code = next((status, code) for kind, status, code in _MEANINGS if isinstance(error, kind))
    failure = Failure(status=status, message=str(error), code=code)
    if isinstance(error, RequestError):
        failure = replace(failure, field=error.field)
    if isinstance(error, ContextLengthError):
        words = f"prompt is too long: {error.num_tokens} tokens > {error.max_prompt_tokens} maximum"
        failure = replace(failure, anthropic_message=words)
    if isinstance(error, EngineUnavailableError):
        failure = replace(failure, headers={"retry-after": str(max(1, math.ceil(error.retry_after)))})
    return failure


@contextmanager
def addressed(fields: Mapping[str, str | None]) -> Iterator[None]:
    """Raise RequestErrors under the names that a request has for what is wrong.

    `fields` maps the engine's name of a field to the request's own; parts of a field, as in `a.b`, go with it. None
    leaves the name as it is.
    """
    try:
        yield
    except RequestError as error:
        name = error.field or ""
        own = fields.get(name.partition(".")[0])
        if own is not None:
            error.field = own
            if "." in name:  # a word by itself, such as prompt, may be one of the sentence
                error.args = (str(error).replace(name, own, 1),)
        raise


def openai_error(failure: Failure) -> bytes:
    """The body for a failure, as a response or as the last event of a stream."""
    is_client = failure.status < 500 and failure.status != STATUS_CLIENT_GONE
    field = None if failure.field is None else _printable(failure.field)
    kind = "invalid_request_error" if is_client else "server_error"
    return msgspec.json.encode(ErrorBody(ErrorInfo(_printable(failure.message), kind, field, failure.code)))


def anthropic_error(failure: Failure, request_id: str | None) -> bytes:
    """The same in the form of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    info = AnthropicErrorInfo(kind, _printable(failure.anthropic_message or failure.message))
    return msgspec.json.encode(AnthropicErrorBody(info, request_id))


def ollama_error(failure: Failure) -> bytes:
    """The same in the form of Ollama's API, as a response or as the last line of a stream."""
    return msgspec.json.encode(OllamaErrorBody(_printable(failure.message)))


def responses_code(failure: Failure) -> str:
    """The code of a response that has failed: the Responses API has no statuses within a stream."""
    return "server_error" if failure.status >= 500 else failure.code or "invalid_prompt"


def is_anthropic(scope: Scope) -> bool:
    """Whether a request speaks Anthropic's API: by its route, or by the header that its clients send."""
    return route_path(scope).startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def is_ollama(scope: Scope) -> bool:
    """Whether a request speaks Ollama's API."""
    return route_path(scope).startswith("/api/")


def error_response(scope: Scope, failure: Failure) -> Response:
    """The failure in the form of the API that was called."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    if is_ollama(scope):
        body = ollama_error(failure)
    else:
        body = anthropic_error(failure, request_id) if is_anthropic(scope) else openai_error(failure)
    return json_response(body, failure.status, failure.headers)


def http_failure(
    status: int, message: str, headers: Mapping[str, str] | None = None, field: str | None = None
) -> Failure:
    """A failure that HTTP itself has a name for."""
    return Failure(status=status, message=message, field=field, code=_CODES.get(status), headers=headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON; bytes are JSON already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(request.scope, failure_of(error))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, field = explain_validation(error.errors())
    return error_response(request.scope, http_failure(400, message, field=field))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        path, missing = request.url.path[:200], missing_capability(route_path(request.scope))
        message = f"there is no {request.method} {path}; /docs lists what there is"
        if missing is not None:
            message = f"this server does not have {path}: {missing}"
    elif error.status_code == 405:
        message = f"{request.url.path[:200]} does not answer to {request.method}"
    field = error.field if isinstance(error, BodyError) else None
    return error_response(request.scope, http_failure(error.status_code, message, error.headers, field))


async def _on_bug(request: Request, error: Exception) -> Response:
    """The HTTP server logs the traceback; the client gets no details."""
    return error_response(request.scope, http_failure(500, BUG_MESSAGE))


def _printable(text: str) -> str:
    """A client may send lone surrogates, which no answer can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
