"""Limits on bodies, request ids and the access log."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from quire.metrics.stats import HttpEnd, Observer
from quire.server.middleware import RequestContext, is_request_id
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import http, live_server, make_app, serving


async def test_without_keys_everybody_may_come_in() -> None:
    async with serving() as session:
        assert (await session.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 200


async def test_large_bodies_are_refused_before_they_are_read() -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    client = FakeClient()
    async with serving(client, max_body_bytes=5000) as session:
        json_type = {"content-type": "application/json"}
        declared = await session.post("/v1/completions", content=b'"' + b"x" * 5000, headers=json_type)
        chunked = await session.post("/v1/completions", content=endless(), headers=json_type)
        small = await session.post("/v1/completions", json={"prompt": "x" * 100})
    assert (declared.status_code, chunked.status_code, small.status_code) == (413, 413, 200)
    for response in (declared, chunked):
        assert response.json()["error"]["code"] == "request_too_large"
        assert response.headers["connection"] == "close"
    assert len(client.added) == 1


@pytest.mark.parametrize("declared", [True, False])
def test_who_sends_too_much_still_hears_why(declared: bool) -> None:
    """Far more than the system's buffers hold, by a client that reads nothing before it has sent everything."""
    body = b'"' + b"x" * (8 << 20)
    with live_server(max_body_bytes=1 << 20) as server, httpx.Client(timeout=30) as client:
        for _ in range(2):  # what is left of the first request does not disturb the next
            content = body if declared else (body[i : i + (1 << 20)] for i in range(0, len(body), 1 << 20))
            headers = {"content-type": "application/json"}
            answer = client.post(f"{server.url}/v1/completions", content=content, headers=headers)
            assert answer.status_code == 413
            assert "--max-body-bytes" in answer.json()["error"]["message"]


def test_a_body_without_end_is_not_read_for_ever() -> None:
    with live_server(max_body_bytes=1000) as server, server.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100000000\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 100_000_000)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "x"} x',
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
    ],
)
async def test_malformed_bodies(body: bytes) -> None:
    async with serving() as session:
        response = await session.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@given(st.text(max_size=140))
def test_request_ids_are_fit_for_headers_and_logs(text: str) -> None:
    if is_request_id(text):
        assert text.isascii()
        assert text.isprintable()
        assert 0 < len(text) <= 128
        assert " " not in text


async def test_an_unfit_request_id_is_replaced() -> None:
    async with serving() as session:
        for given_id in ("a b", "x" * 129, ""):
            response = await session.get("/version", headers={"x-request-id": given_id})
            assert response.headers["x-request-id"] != given_id


async def test_a_request_is_counted_before_its_client_has_the_whole_answer() -> None:
    seen: list[str] = []

    class Counting(Observer):
        def on_http_end(self, event: HttpEnd) -> None:
            seen.append(f"counted {event.status}")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        seen.append(message.get("body", b"start").decode())

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await RequestContext(answer, Counting())(scope, receive, send)
    assert seen == ["start", "a", "counted 201", "b"]


async def test_the_access_log_holds_no_content(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quire"):
        async with serving(FakeClient("answer-text")) as session:
            body = {"prompt": "secret-text", "user": "secret-user", "n": 2}
            await session.post("/v1/completions?key=secret-query", json=body, headers={"x-request-id": "id-7"})
            await session.get("/health")
            await session.get("/line%0Abreak")
    assert "POST '/v1/completions' 200 in" in caplog.text
    assert "id-7" in caplog.text
    assert "secret" not in caplog.text
    assert "answer-text" not in caplog.text
    assert "/line\\nbreak" in caplog.text
    (probe,) = [record for record in caplog.records if "/health" in record.getMessage()]
    assert probe.levelno == logging.DEBUG


async def test_content_is_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire"):
        async with serving(FakeClient("x"), log_requests=True) as session:
            await session.post("/v1/completions", json={"prompt": "some text", "top_k": 3})
    assert "some text" in caplog.text
    assert "top_k=3" in caplog.text


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("chat.localhost:8000", True),
        ("[::1]:8000", True),
        ("192.168.1.20", True),
        ("quire:8000", True),  # a container's name
        ("named.example:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8000", False),
        ("127.0.0.1.", True),
    ],
)
async def test_names_that_a_stranger_could_have_are_refused(host: str, is_ours: bool) -> None:
    """DNS rebinding: a stranger's page has its own name point here. With a key it gets nothing anyway."""
    named = {"allowed_hosts": ("named.example",)}
    for keys, wanted in (((), 200 if is_ours else 403), (("secret",), 401)):
        async with http(make_app(api_keys=keys, **named)) as session:
            answer = await session.get("/v1/models", headers={"host": host})
            assert answer.status_code == wanted
            if wanted == 403:
                assert "--allowed-hosts" in answer.json()["error"]["message"]


async def test_any_name_is_taken_where_that_is_set() -> None:
    async with http(make_app(allowed_hosts=("*",))) as session:
        assert (await session.get("/v1/models", headers={"host": "any.example"})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://quire", 200),
        ("https://quire", 200),  # a proxy ended TLS
        ("http://friend.example", 200),
        ("http://evil.example", 403),
        ("http://quire.evil.example", 403),
        ("null", 403),
    ],
)
async def test_pages_of_other_origins_may_not_post(origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    async with http(make_app(allowed_origins=("http://friend.example",))) as session:
        answer = await session.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, headers=headers)
    assert answer.status_code == status
