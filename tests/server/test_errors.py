"""Every error as a status and a body; validation errors that name the field."""

from __future__ import annotations

import json

import pytest

from quire.server.errors import (
    ClientDisconnectedError,
    UnknownModelError,
    encode_error,
    error_response,
    status_of,
)
from quire.types.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineUnavailableError,
    GenerationError,
    QueueFullError,
    QuireError,
    RequestError,
    TokenizerError,
)
from tests.server.helpers import serving


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (RequestError("no", "top_p"), 400, "invalid_request_error", "top_p", None),
        (UnknownModelError("x", ["a"]), 404, "invalid_request_error", "model", "model_not_found"),
        (ContextLengthError(9, 8), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        (QueueFullError("full"), 503, "server_error", None, "queue_full"),
        (EngineUnavailableError("away"), 503, "server_error", None, "engine_unavailable"),
        (EngineDeadError("dead"), 500, "server_error", None, None),
        (GenerationError("id", "bad step"), 500, "server_error", None, None),
        (TokenizerError("bad template"), 500, "server_error", None, None),
        (ClientDisconnectedError("gone"), 499, "server_error", None, None),
    ],
)
def test_statuses_and_bodies(error: QuireError, status: int, kind: str, param: str | None, code: str | None) -> None:
    assert status_of(error) == status
    body = json.loads(encode_error(error))
    assert body == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    assert (
        "retry-after" in error_response({"type": "http", "path": "/v1/completions", "headers": []}, error).headers
    ) == (status == 503)


def test_lone_surrogates_do_not_break_the_answer() -> None:
    body = json.loads(encode_error(RequestError("bad \ud800", "field\udfff")))
    assert body["error"]["message"] == "bad ?"


async def test_a_long_value_is_not_repeated_whole() -> None:
    async with serving() as session:
        response = await session.post("/v1/completions", json={"prompt": "x", "temperature": "y" * 5000})
    assert len(response.json()["error"]["message"]) < 200
