"""The class that Ray Serve runs, without Ray; tests/worker/test_ray.py has it in a cluster, nightly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from quire.server.ray_serve import QuireServer, _value, respond
from quire.types.errors import ConfigError


def asked(path: str = "/", body: bytes = b"", method: str = "POST") -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return Request({**scope, "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive)


async def test_an_answer_streams_and_a_reader_who_leaves_is_told_of() -> None:
    has_left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"the body"
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"b"), (b"x-a", b"c")]})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if scope["path"] == "/endless":
            assert (await receive())["type"] == "http.disconnect"
            has_left.set()
        await send({"type": "http.response.body", "body": b" last"})

    answer = await respond(app, asked("/", b"the body"))
    assert (answer.status_code, answer.headers.getlist("x-a")) == (201, ["b", "c"])
    body: Any = answer.body_iterator
    assert [bytes(chunk) async for chunk in body] == [b"first", b" last"]
    stream: Any = (await respond(app, asked("/endless", b"the body"))).body_iterator
    assert await anext(stream) == b"first"
    await stream.aclose()
    await asyncio.wait_for(has_left.wait(), 10)


async def test_an_application_that_fails_is_not_silent() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await respond(app, asked())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 8000}, "port is for `quire serve`"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_modellen": 8}, "unknown setting 'max_modellen'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuireServer(model="smollm2", **settings)


async def test_a_model_that_is_not_there_fails_the_health_check(tmp_path: Path) -> None:
    replica = QuireServer(model=str(tmp_path / "none"))
    with pytest.raises(Exception, match="none"):
        await replica.check_health()


def test_arguments_of_a_command_line() -> None:
    values = [_value(text) for text in ("8", "true", '{"num_gpus": 1}', "smollm2", "1.5")]
    assert [*values, _value(3)] == [8, True, {"num_gpus": 1}, "smollm2", 1.5, 3]
