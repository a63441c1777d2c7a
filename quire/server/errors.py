"""Every failure as an HTTP status and the error body of the API that was called: OpenAI's, or Anthropic's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
STATUS_CLIENT_GONE = 499  # nginx's number for it; nobody is there to read it, but the log is

_CODES = {
    401: "invalid_api_key",
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


def status_of(error: QuireError) -> int:
    if isinstance(error, ClientDisconnectedError):
        return STATUS_CLIENT_GONE
    if isinstance(error, UnknownModelError | NotFoundError):
        return 404
    if isinstance(error, RequestError):
        return 400
    if isinstance(error, ToolServerError):
        return 502
    return 503 if isinstance(error, EngineUnavailableError) else 500


def encode_error(error: QuireError) -> bytes:
    """The body for an error, as a response or as the last event of a stream."""
    if isinstance(error, RequestError):
        return error_body(str(error), "invalid_request_error", error.field, request_error_code(error))
    if isinstance(error, QueueFullError):
        return error_body(str(error), "server_error", code="queue_full")
    code = "engine_unavailable" if isinstance(error, EngineUnavailableError) else None
    return error_body(str(error), "server_error", code=code)


def request_error_code(error: RequestError) -> str | None:
    """What programs tell errors apart by that have the same status."""
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    return "model_not_found" if isinstance(error, UnknownModelError) else None


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    param = None if param is None else _printable(param)
    return msgspec.json.encode(ErrorBody(ErrorInfo(_printable(message), kind, param, code)))


def is_anthropic(scope: Scope) -> bool:
    """Whether a request speaks Anthropic's API: by its route, or by the header that its clients send."""
    return route_path(scope).startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def anthropic_error(error: QuireError, request_id: str | None) -> bytes:
    """`encode_error` in the form of Anthropic's API."""
    message = str(error)
    if isinstance(error, ContextLengthError):  # these are the words that its clients look for
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_prompt_tokens} maximum"
    return encode_anthropic_error(status_of(error), message, request_id)


def encode_anthropic_error(status: int, message: str, request_id: str | None) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorInfo(kind, _printable(message)), request_id))


def error_response(scope: Scope, error: QuireError) -> Response:
    headers = {}
    if isinstance(error, EngineUnavailableError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    status = status_of(error)
    if is_anthropic(scope):
        return json_response(anthropic_error(error, _request_id(scope)), status, headers)
    return json_response(encode_error(error), status, headers)


def plain_error_response(
    scope: Scope, status: int, message: str, headers: Mapping[str, str] | None = None, field: str | None = None
) -> Response:
    if is_anthropic(scope):
        return json_response(encode_anthropic_error(status, message, _request_id(scope)), status, headers)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response(error_body(message, kind, field, _CODES.get(status)), status, headers)


def _request_id(scope: Scope) -> str | None:
    request_id: str | None = scope.get("state", {}).get("request_id")
    return request_id


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(request.scope, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, field = explain_validation(error.errors())
    return plain_error_response(request.scope, 400, message, field=field)


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
    return plain_error_response(request.scope, error.status_code, message, error.headers, field)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The traceback is logged by the HTTP server; a stranger learns no more than that it happened."""
    return plain_error_response(request.scope, 500, BUG_MESSAGE)


def _printable(text: str) -> str:
    """A client may send lone surrogates, which no answer can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
