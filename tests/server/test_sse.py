"""Streams on real sockets: framing, clients that leave, clients that read slowly."""

from __future__ import annotations

import json
import random
import re
import socket
import threading

import pytest

from quire.types.request import EngineRequest
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import LiveServer, live_server, long_client


def post(path: str, body: object, *, extra: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def dechunked(body: bytes) -> bytes:
    """The data of a chunked body, whose framing is checked."""
    data = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        data, body = data + body[:length], body[length:]
        assert body.startswith(b"\r\n")
        body = body[2:]
        if length == 0:
            assert body == b""
            return data


def endless(request: EngineRequest) -> list[int]:
    return [65] * 400_000


def test_framing() -> None:
    with live_server(FakeClient('say "hi"\n\ndata: x\r\nend')) as server, server.connect() as connection:
        connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True}, extra="Connection: close\r\n"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert b"content-length" not in headers
    assert b"x-request-id" in headers
    assert b"server" not in headers
    events = dechunked(body).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(re.fullmatch(rb"data: \{[^\n]*\}", event) for event in events[:-2])
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == 'say "hi"\n\ndata: x\r\nend'


def test_a_connection_serves_one_stream_after_another() -> None:
    with live_server(FakeClient("hey")) as server, server.connect() as connection:
        for _ in range(3):
            connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True}))
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)
            assert b"[DONE]" in received


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_aborts_its_request(path: str, stream: bool) -> None:
    client = long_client(endless)
    body = {"stream": stream, "max_tokens": 400_000, "n": 2}
    body |= {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    with live_server(client) as server:
        with server.connect() as connection:
            connection.sendall(post(path, body))
            if stream:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            else:
                server.wait_until(lambda: client.num_steps > 3)
        server.wait_until(lambda: len(client.aborted) == len(client.added) > 0)
        server.wait_until(lambda: not client.has_unfinished())
        assert_serves(server)


def test_a_client_that_leaves_while_it_waits_for_its_first_token() -> None:
    """Nothing has been sent yet, so there is nothing to fail on but the connection itself."""

    class Waiting(FakeClient):
        def get_outputs(self):  # type: ignore[no-untyped-def]  # as in FakeClient
            if any(request.token_ids == [90] for request in self.added) and not self.aborted:
                return type(super().get_outputs())([])
            return super().get_outputs()

    client = Waiting("x")
    with live_server(client) as server:
        with server.connect() as connection:
            connection.sendall(post("/v1/completions", {"prompt": [90], "stream": True}))
            server.wait_until(lambda: len(client.added) == 1)
        server.wait_until(lambda: len(client.aborted) == 1)
        assert_serves(server)


def test_a_slow_reader_costs_no_more_than_its_text_and_delays_nobody() -> None:
    """It stops reading at all; the engine ends its 40,000 tokens, which wait merged and not as 40,000 events."""
    tokens = 40_000
    client = long_client(endless, chunk=50)
    with live_server(client, small_buffers=True) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": tokens}))
        first = connection.recv(1)
        server.wait_until(lambda: not client.has_unfinished())
        assert_serves(server)
        received = first
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    body = dechunked(received.partition(b"\r\n\r\n")[2])
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in body.split(b"\n\n")[:-2]]
    assert "".join(texts) == "A" * tokens
    assert max(map(len, texts)) > 1000


def test_many_clients_of_which_a_third_leave_at_random_moments() -> None:
    client = long_client("some answer " * 20)
    choose = random.Random(0)
    leaving = {index: choose.randint(1, 4000) for index in range(90) if index % 3 == 0}
    answers: dict[int, bytes] = {}

    def visit(server: LiveServer, index: int) -> None:
        with server.connect() as connection:
            body = {"prompt": f"{index}", "stream": True, "max_tokens": 200, "n": 1 + index % 2}
            connection.sendall(post("/v1/completions", body, extra="Connection: close\r\n"))
            if index in leaving:
                connection.recv(leaving[index])
            else:
                answers[index] = read_all(connection)

    with live_server(client) as server:
        threads = [threading.Thread(target=visit, args=(server, index)) for index in range(90)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        server.wait_until(lambda: not client.has_unfinished())
        assert_serves(server)
    assert len(answers) == 60
    assert all(b"data: [DONE]" in answer for answer in answers.values())


def assert_serves(server: LiveServer) -> None:
    with server.connect() as connection:
        body = {"prompt": "x", "max_tokens": 1}
        connection.sendall(post("/v1/completions", body, extra="Connection: close\r\n"))
        assert read_all(connection).startswith(b"HTTP/1.1 200")
