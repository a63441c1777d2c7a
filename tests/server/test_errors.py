"""Every error as a status and a body; validation errors that name the field."""

from __future__ import annotations

import json

import pytest

from quire.server.errors import (
    ClientDisconnectedError,
    UnknownModelError,
    addressed,
    error_response,
    failure_of,
    openai_error,
    responses_code,
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
from quire.types.structured import GrammarError
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
    failure = failure_of(error)
    assert failure.status == status
    body = json.loads(openai_error(failure))
    assert body == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    response = error_response({"type": "http", "path": "/v1/completions", "headers": []}, failure)
    assert ("retry-after" in response.headers) == (status == 503)


def test_every_failure_has_its_code_in_the_responses_api() -> None:
    errors = {
        "invalid_prompt": RequestError("no"),
        "context_length_exceeded": ContextLengthError(9, 8),
        "server_error": QueueFullError("full"),
    }
    assert {responses_code(failure_of(error)): error for error in errors.values()} == errors


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_each_api_has_its_form(path: str) -> None:
    response = error_response({"type": "http", "path": path, "headers": []}, failure_of(ContextLengthError(9, 8)))
    error = json.loads(bytes(response.body))["error"]
    if path == "/v1/messages":
        assert error == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 7 maximum"}
    else:
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        (GrammarError("structured_outputs.json: bad", "structured_outputs.json"), "text.format", "text.format: bad"),
        (ContextLengthError(9, 8), "input", str(ContextLengthError(9, 8))),
        (RequestError("top_p is 3", "top_p"), "top_p", "top_p is 3"),
        (RequestError("no"), None, "no"),
    ],
)
def test_an_error_names_fields_as_the_request_does(error: QuireError, field: str | None, message: str) -> None:
    fields = {"structured_outputs": "text.format", "prompt": "input", "top_k": None}
    with pytest.raises(RequestError) as caught, addressed(fields):
        raise error
    assert caught.value is error
    assert (caught.value.field, str(caught.value)) == (field, message)


def test_lone_surrogates_do_not_break_the_answer() -> None:
    body = json.loads(openai_error(failure_of(RequestError("bad \ud800", "field\udfff"))))
    assert body["error"]["message"] == "bad ?"


async def test_a_long_value_is_not_repeated_whole() -> None:
    async with serving() as session:
        response = await session.post("/v1/completions", json={"prompt": "x", "temperature": "y" * 5000})
    assert len(response.json()["error"]["message"]) < 200
