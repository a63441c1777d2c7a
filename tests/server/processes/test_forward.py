"""What an API process forwards, to whom, and what of the answer it sends; the others are canned."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.middleware import RequestContext
from quire.server.processes.forward import PROCESS_HEADER, Forwarding, Neighbours

SECRET = "secret"
OK = b"HTTP/1.1 200 OK\r\nx-api-process: 1\r\nx-request-id: theirs\r\nvary: Origin\r\ncontent-length: 5\r\n\r\nthere"
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno"


class Other:
    """Another process: answers each connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        self.asked.append(head + await reader.readexactly(length))
        writer.write(self.answer)
        await writer.drain()
        writer.close()


async def here(scope: Scope, receive: Receive, send: Send) -> None:
    """The routes of this process: it has no response but resp_mine."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    status = 404 if scope["path"].startswith("/v1/responses") and b"mine" not in body else 200
    if scope["path"].endswith("resp_mine"):
        status = 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"here"})


@asynccontextmanager
async def process(folder: Path, other: Other | None) -> AsyncIterator[httpx.AsyncClient]:
    """Process 0 of two."""
    app: ASGIApp = RequestContext(Forwarding(here, Neighbours(str(folder), SECRET), 0, 2))
    async with AsyncExitStack() as stack:
        if other is not None:
            await stack.enter_async_context(await asyncio.start_unix_server(other, folder / "1"))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        yield await stack.enter_async_context(client)


KEY_OF_1 = next(str(number) for number in range(50) if zlib.crc32(str(number).encode()) % 2 == 1)
KEY_OF_0 = next(str(number) for number in range(50) if zlib.crc32(str(number).encode()) % 2 == 0)


async def test_a_response_that_is_not_here_is_asked_of_the_others(tmp_path: Path) -> None:
    other = Other(OK)
    async with process(tmp_path, other) as client:
        mine = await client.get("/v1/responses/resp_mine")
        assert (mine.text, mine.headers[PROCESS_HEADER], other.asked) == ("here", "0", [])
        theirs = await client.get("/v1/responses/resp_theirs?stream=true", headers={"authorization": "Bearer k"})
        assert (theirs.status_code, theirs.text, theirs.headers.get_list(PROCESS_HEADER)) == (200, "there", ["1"])
        assert "vary" not in theirs.headers
        assert theirs.headers.get_list("x-request-id") != ["theirs"]
        head = other.asked[0]
        assert head.startswith(b"GET /v1/responses/resp_theirs?stream=true HTTP/1.1\r\n")
        assert b"authorization: Bearer k" in head
        assert f"x-request-id: {theirs.headers['x-request-id']}".encode() in head
        await client.post("/v1/responses", json={"previous_response_id": "resp_theirs"})
        assert other.asked[1].endswith(b'{"previous_response_id":"resp_theirs"}')


async def test_a_response_that_nobody_has_is_a_404_of_this_process(tmp_path: Path) -> None:
    for other in (Other(MISSING), None):
        async with process(tmp_path, other) as client:
            answer = await client.get("/v1/responses/resp_nobody")
            assert (answer.status_code, answer.text, answer.headers[PROCESS_HEADER]) == (404, "here", "0")
        (tmp_path / "1").unlink(missing_ok=True)


async def test_a_key_decides_who_answers_and_503_if_that_process_is_not_there(tmp_path: Path) -> None:
    other = Other(OK)
    async with process(tmp_path, other) as client:
        own = await client.post("/v1/completions", json={}, headers={"Idempotency-Key": KEY_OF_0})
        theirs = await client.post("/v1/completions", json={}, headers={"Idempotency-Key": KEY_OF_1})
        assert (own.text, theirs.text) == ("here", "there")
    (tmp_path / "1").unlink()
    async with process(tmp_path, None) as client:
        gone = await client.post("/v1/completions", json={}, headers={"Idempotency-Key": KEY_OF_1})
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "engine_unavailable")
        assert gone.headers["retry-after"] == "2"


async def test_what_was_forwarded_here_goes_no_further_and_nobody_can_pretend_that(tmp_path: Path) -> None:
    other = Other(OK)
    async with process(tmp_path, other) as client:
        searched = await client.get("/v1/responses/resp_theirs", headers={"x-quire-hop": f"{SECRET}:search"})
        assert (searched.status_code, other.asked) == (404, [])
        keyed = {"x-quire-hop": f"{SECRET}:key", "Idempotency-Key": KEY_OF_1}
        assert (await client.post("/v1/completions", json={}, headers=keyed)).text == "here"
        forged = await client.get("/v1/responses/resp_theirs", headers={"x-quire-hop": "guess:search"})
        assert forged.text == "there"


async def test_adapters_that_come_and_go_are_refused_by_name(tmp_path: Path) -> None:
    async with process(tmp_path, None) as client:
        refused = await client.post("/v1/load_lora_adapter", json={})
        assert refused.status_code == 400
        assert "--api-server-count 1" in refused.json()["error"]["message"]
