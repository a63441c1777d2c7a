"""Connections by real sockets: large headers, requests that never end, sockets that are closed in one direction."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from quire.server import connection as connection_module
from quire.server.connection import MAX_HEADERS
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import live_server, long_client, make_certificate

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NewLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: list[NewLoop] = [asyncio.new_event_loop, uvloop.new_event_loop]


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection, which it does within the socket's limit."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def request(**fields: object) -> bytes:
    body = json.dumps({"prompt": "abc", **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "headers",
    [
        b"x-long: " + b"a" * (32 << 20),  # never even complete
        b"".join(b"x-%d: %b\r\n" % (i, b"a" * 1000) for i in range(90)),
        b"".join(b"x-%d: a\r\n" % i for i in range(MAX_HEADERS)),
        b"x-one: " + b"a" * (65 << 10) + b"\r\n",
    ],
    ids=["endless", "large", "many", "one"],
)
@pytest.mark.parametrize("new_loop", LOOPS)
def test_large_headers_are_refused(headers: bytes, new_loop: NewLoop) -> None:
    client = FakeClient("x")
    with live_server(client, new_loop=new_loop) as server, server.connect() as connection:
        connection.sendall(HEAD + headers + b"Content-Length: 0\r\n\r\n")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert client.added == []


def test_headers_within_the_limits_are_taken_one_byte_at_a_time() -> None:
    with live_server(FakeClient("hello")) as server, server.connect() as connection:
        many = b"".join(b"x-%d: %b\r\n" % (i, b"a" * 600) for i in range(MAX_HEADERS - 10))
        data = request().replace(b"Host: x\r\n", b"Host: x\r\n" + many)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in data[:100]:
            connection.sendall(bytes([byte]))
        connection.sendall(data[100:])
        for _ in range(2):  # the same connection is counted anew for its next request
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            assert b"200 OK" in answer
            connection.sendall(data)


def test_what_is_no_http_is_told_so() -> None:
    with live_server() as server, server.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", b""), (HEAD, b"HTTP/1.1 408"), (HEAD[:10], b"HTTP/1.1 408"), (HEAD + b"Content-Length: 10\r\n\r\n{", b"")],
    ids=["nothing", "headers", "first line", "body"],
)
def test_a_request_that_never_ends_is_given_up(sent: bytes, status: bytes) -> None:
    with live_server(header_timeout=0.2) as server, server.connect() as connection:
        connection.sendall(sent)
        begin = time.monotonic()
        assert received(connection).startswith(status)
        assert time.monotonic() - begin < 10


def test_a_trickle_of_headers_does_not_extend_the_deadline() -> None:
    with live_server(header_timeout=0.5) as server, server.connect() as connection:
        connection.settimeout(0.05)
        connection.sendall(HEAD)
        answer = b""
        deadline = time.monotonic() + 20
        while not answer and time.monotonic() < deadline:
            connection.sendall(b"a")
            try:
                answer = connection.recv(1000)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_trickle_of_a_body_does_not_extend_the_deadline() -> None:
    with live_server(header_timeout=0.5) as server, server.connect() as connection:
        connection.settimeout(0.05)
        connection.sendall(HEAD + b"Content-Length: 10000\r\n\r\n{")
        begin = time.monotonic()
        is_closed = False
        while not is_closed and time.monotonic() - begin < 5:
            try:
                connection.sendall(b" ")
                is_closed = connection.recv(1000) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                is_closed = True
    assert is_closed


def test_a_body_that_comes_steadily_may_take_several_timeouts() -> None:
    body = request().partition(b"\r\n\r\n")[2] + b" " * 8000
    with live_server(FakeClient("hello"), header_timeout=0.3) as server, server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        connection.settimeout(0.1)
        for begin in range(0, len(body), 1000):
            connection.sendall(body[begin : begin + 1000])
            if begin + 1000 < len(body):
                with pytest.raises(TimeoutError):  # nothing comes, and the connection stays open
                    connection.recv(1)
        connection.settimeout(10)
        assert b"200 OK" in connection.recv(1 << 16)


def test_a_slow_answer_is_no_slow_request() -> None:
    """The deadline is the request's: an answer may take longer."""
    slow = long_client(lambda request: (65 for _ in range(3000)))
    with live_server(slow, header_timeout=0.1) as server, server.connect() as connection:
        connection.sendall(request(stream=True, max_tokens=3000))
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(1 << 16)
    assert data.count(b"data: ") > 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_half_closed_socket_gets_its_answer(stream: bool, new_loop: NewLoop) -> None:
    with live_server(FakeClient("hello"), new_loop=new_loop) as server, server.connect() as connection:
        connection.sendall(request(stream=stream))
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)  # up to the end of the connection
    assert b"200 OK" in answer
    assert b"[DONE]" in answer if stream else b"hello" in answer


def test_requests_sent_before_the_half_close_are_all_answered() -> None:
    with live_server(FakeClient("hello")) as server, server.connect() as connection:
        connection.sendall(request() * 3)
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).count(b"200 OK") == 3


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_client_that_is_gone_altogether_is_still_noticed(new_loop: NewLoop) -> None:
    """It closes its socket while it waits: nothing tells this from a half-closed one but what comes back."""
    endless = long_client(lambda request: (65 for _ in range(10**7)))
    with live_server(endless, new_loop=new_loop) as server:
        with server.connect() as connection:
            connection.sendall(request(max_tokens=10**6, ignore_eos=True))
            server.wait_until(lambda: len(endless.added) == 1)
        server.wait_until(lambda: len(endless.aborted) == 1)


@pytest.mark.parametrize("says_goodbye", [False, True])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_over_tls_a_half_closed_socket_is_a_closed_one(tmp_path: Path, says_goodbye: bool, new_loop: NewLoop) -> None:
    """Python's TLS closes both directions together: the request ends at once, and nothing is left of it."""
    certificate = make_certificate(tmp_path)
    endless = long_client(lambda request: (65 for _ in range(10**7)))
    trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    with live_server(endless, new_loop=new_loop, **certificate) as server:
        connection = trust.wrap_socket(server.connect(), server_hostname="127.0.0.1")
        with connection:
            connection.sendall(request(max_tokens=10**6, ignore_eos=True))
            server.wait_until(lambda: len(endless.added) == 1)
            if says_goodbye:
                connection.unwrap()  # sends close_notify and waits for the server's
            else:
                connection.shutdown(socket.SHUT_WR)
                assert b"200 OK" not in received(connection)
            server.wait_until(lambda: len(endless.aborted) == 1)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_last_files_that_may_be_opened_are_told_of_once(
    new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server(FakeClient("x"), new_loop=new_loop) as server:
        monkeypatch.setattr(connection_module, "_OPEN_FILES", connection_module.OpenFiles())
        with server.connect() as first:
            first.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert received(first)
            assert "ulimit" not in caplog.text, "there is room for many more"
            limit = first.fileno() + 5
            monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
        for _ in range(3):
            with server.connect() as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert received(connection)
    (warning,) = [record.getMessage() for record in caplog.records if "ulimit -n" in record.getMessage()]
    assert f"of the {limit} that" in warning
