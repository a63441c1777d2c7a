"""Streams whose first token takes long: headers and keep-alives come first, errors have each API's form."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from quire.server import sse
from quire.server.openai.responses import handler as responses
from quire.server.sse import ACCEPTED, KEEP_ALIVE, EventStream
from quire.types.errors import QuireError
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, LiveServer, ResumingProvider, http, live_server, make_app
from tests.server.waiting import BODIES, CHAT, COMPLETIONS, HELLO, MESSAGES, RESPONSES, WaitingClient

LIMIT = 20.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens soon."""
    monkeypatch.setattr(sse, "VERDICT_SECONDS", 0.02)
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)


class Connection:
    """An ASGI server's side of one stream."""

    def __init__(self, response: EventStream) -> None:
        self.messages: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        scope: dict[str, Any] = {"type": "http", "state": {}}
        self.task = asyncio.create_task(response(scope, self._receive, self._send))  # type: ignore[arg-type]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def _receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._news.set()


class Script:
    """Events that a test lets out one after the other."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def say(self, item: bytes | Exception | None) -> None:
        self._queue.put_nowait(item)

    async def events(self) -> AsyncGenerator[bytes, None]:
        yield ACCEPTED
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


async def test_a_prompt_first_event_comes_with_the_headers_and_nothing_before_it() -> None:
    script = Script()
    connection = Connection(EventStream(script.events(), opening=lambda: b"opening"))
    script.say(b"one ")
    script.say(b"two ")
    script.say(None)
    await connection.task
    assert [message["type"] for message in connection.messages] == ["http.response.start"] + [
        "http.response.body"
    ] * 3
    assert connection.body == b"one two data: [DONE]\n\n"


@pytest.mark.usefixtures("impatient")
async def test_a_late_first_event_comes_after_headers_an_opening_and_keep_alives() -> None:
    script = Script()
    count = iter(range(1000))
    stream = EventStream(script.events(), opening=lambda: b"opening ", keep_alive=lambda: b"alive%d " % next(count))
    connection = Connection(stream)
    await connection.until(lambda: b"alive2 " in connection.body)
    assert connection.messages[0]["type"] == "http.response.start"
    script.say(b"one ")
    await connection.until(lambda: b"one" in connection.body)
    await connection.until(lambda: b"alive" in connection.body.partition(b"one ")[2])  # later silence too
    script.say(None)
    await connection.task
    assert re.fullmatch(rb"opening (alive\d+ )+one (alive\d+ )+data: \[DONE\]\n\n", connection.body)
    assert not connection.messages[-1]["more_body"]


async def test_an_error_before_the_headers_is_raised() -> None:
    script = Script()
    connection = Connection(EventStream(script.events()))
    script.say(QuireError("no"))
    with pytest.raises(QuireError, match="no"):
        await connection.task
    assert connection.messages == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [QuireError("no"), RuntimeError("a bug")])
async def test_an_error_after_the_headers_is_told(error: Exception) -> None:
    script = Script()
    connection = Connection(EventStream(script.events()))
    await connection.until(lambda: KEEP_ALIVE in connection.body)
    script.say(error)
    if isinstance(error, QuireError):
        await connection.task
        assert connection.body.endswith(b"data: [DONE]\n\n")
    else:
        with pytest.raises(RuntimeError):
            await connection.task
    told = json.loads(connection.body.replace(KEEP_ALIVE, b"").removeprefix(b"data: ").partition(b"\n")[0])
    assert told["error"]["message"] == ("no" if isinstance(error, QuireError) else sse.BUG_MESSAGE)


READ_TIMEOUT = 1.0
GAVE_UP = (openai.APITimeoutError, httpx.ReadTimeout)


def ask_chat(client: openai.OpenAI) -> str:
    options: Any = {"stream_options": {"include_usage": True}, "n": 2}
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **options))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len("Hi there.")
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts[0] == texts[1]
    return texts[0]


def ask_completions(client: openai.OpenAI) -> str:
    chunks = client.completions.create(model=MODEL, prompt=["Well. ", "So. "], echo=True, stream=True)
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts[1].removeprefix("So. ") == texts[0].removeprefix("Well. ")
    return texts[1].removeprefix("So. ")


def ask_responses(client: openai.OpenAI) -> str:
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        return stream.get_final_response().output_text


def ask_messages(server: LiveServer) -> str:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=READ_TIMEOUT) as client,
        client.messages.stream(model=MODEL, max_tokens=64, messages=HELLO) as stream,
    ):
        return stream.get_final_text()


def openais(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=READ_TIMEOUT)


def test_sdks_wait_for_a_first_token_that_takes_longer_than_their_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the time to the first token is what a client waits for a word: 20 s against 7 s, made shorter."""
    monkeypatch.setattr(sse, "VERDICT_SECONDS", 0.1)
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(responses, "LOOKS_PER_EVENT", 3)
    slow = WaitingClient("Hi there", seconds=3 * READ_TIMEOUT)
    with live_server(slow) as server, openais(server) as client, ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, client) for ask in (ask_chat, ask_completions, ask_responses)]
        asked.append(pool.submit(ask_messages, server))
        assert [ask.result() for ask in asked] == ["Hi there"] * 4


def test_without_keep_alives_they_would_have_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "VERDICT_SECONDS", 0.1)
    slow = WaitingClient("Hi there", seconds=3 * READ_TIMEOUT)
    with live_server(slow) as server, openais(server) as client, pytest.raises(GAVE_UP):
        ask_chat(client)


@contextmanager
def heard(server: LiveServer, path: str) -> Iterator[Iterator[str]]:
    """The lines of a stream, comments included."""
    body = BODIES[path] | {"stream": True}
    with httpx.stream("POST", server.url + path, json=body, timeout=LIMIT) as answer:
        assert answer.status_code == 200
        yield (line for line in answer.iter_lines() if line)


def tell(server: LiveServer, what: Callable[[], None]) -> None:
    server.loop.call_soon_threadsafe(what)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_openais_clients_hear_while_they_wait(path: str) -> None:
    client = WaitingClient("Hi")
    with live_server(client) as server, heard(server, path) as lines:
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
        tell(server, client.go_on)
        rest = [line for line in lines if line != ": keep-alive"]
    assert all(line.startswith("data: ") for line in rest)
    assert rest[-1] == "data: [DONE]"


@pytest.mark.usefixtures("impatient")
def test_what_clients_of_responses_hear_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients count events and not comments, so that an event comes again from time to time."""
    monkeypatch.setattr(responses, "LOOKS_PER_EVENT", 3)
    client = WaitingClient("Hi")
    with live_server(client) as server, heard(server, RESPONSES) as lines:
        kinds = [line for line in (next(lines) for _ in range(10)) if not line.startswith("data")]
        assert kinds[:2] == ["event: response.created", "event: response.in_progress"]
        assert kinds[2:5] == [": keep-alive", ": keep-alive", "event: response.in_progress"]
        tell(server, client.go_on)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hi"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))


@pytest.mark.usefixtures("impatient")
def test_what_anthropics_clients_hear_while_they_wait() -> None:
    client = WaitingClient("Hi")
    with live_server(client) as server, heard(server, MESSAGES) as lines:
        first = [next(lines) for _ in range(8)]
        assert first[::2] == ["event: message_start"] + ["event: ping"] * 3
        prompt_tokens = json.loads(first[1][6:])["message"]["usage"]["input_tokens"]
        tell(server, client.go_on)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert prompt_tokens == len(client.added[0].token_ids) == events[-2]["usage"]["input_tokens"]
    assert "message_start" not in {event["type"] for event in events}
    assert events[-1]["type"] == "message_stop"


def last_event(path: str, lines: Iterator[str]) -> dict[str, Any]:
    events: list[dict[str, Any]] = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return events[-1]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", BODIES)
def test_an_error_after_the_headers_has_the_apis_own_form(path: str) -> None:
    client = WaitingClient("Hi")
    with live_server(client) as server:
        with heard(server, path) as lines:
            next(lines)
            tell(server, lambda: client.refuse("the grammar does not compile", "structured_outputs"))
            last = last_event(path, lines)
        if path == RESPONSES:
            assert last["type"] == "response.failed"
            error = last["response"]["error"]
            stored = httpx.get(f"{server.url}{RESPONSES}/{last['response']['id']}").json()
            assert (stored["status"], stored["error"]) == ("failed", error)
        else:
            error = last["error"]
            kind = last if path == MESSAGES else error
            assert kind["type"] == ("error" if path == MESSAGES else "invalid_request_error")
    assert error["message"] == "the grammar does not compile"


@pytest.mark.parametrize("path", BODIES)
async def test_what_the_engine_refuses_at_once_keeps_its_status(path: str) -> None:
    client = WaitingClient("Hi")
    async with http(make_app(client)) as session:
        request = asyncio.create_task(session.post(path, json=BODIES[path] | {"stream": True}))
        async with asyncio.timeout(LIMIT):
            while not client.added:
                await asyncio.sleep(0)
        client.refuse("the grammar does not compile", "structured_outputs")
        answer = await request
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the grammar does not compile"


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_known_without_the_engine_keeps_its_status(path: str) -> None:
    client = WaitingClient("Hi")
    client.info = FakeClient().info  # a short context
    body = BODIES[path] | {"stream": True}
    async with http(make_app(client, max_queue=0)) as session:
        long = {name: "x" * 512 if isinstance(value, str) else value for name, value in body.items()}
        if "messages" in body:
            long["messages"] = [{"role": "user", "content": "x" * 512}]
        wrong = await asyncio.gather(*(session.post(path, json=b) for b in (body | {"temperature": -1}, long)))
        assert [answer.status_code for answer in wrong] == [400, 400]
        running = [asyncio.create_task(session.post(path, json=body)) for _ in range(client.info.max_num_seqs)]
        async with asyncio.timeout(LIMIT):
            while len(client.added) < len(running):
                await asyncio.sleep(0)
        refused = await session.post(path, json=body)
        client.go_on()
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", BODIES)
def test_keep_alives_bridge_a_restart_of_the_engine(path: str) -> None:
    """A stream goes on in the next engine; its client hears keep-alives meanwhile and nothing else of it."""
    first, second = WaitingClient("no"), WaitingClient("Hi there")
    with live_server(first, provider=ResumingProvider([first, second])) as server:
        with heard(server, path) as lines:
            begun = next(lines)
            tell(server, first.die)
            server.wait_until(lambda: len(second.added) == 1)
            tell(server, second.go_on)
            text = "\n".join([begun, *lines])
        assert "error" not in re.sub(r'"error": ?null', "", text)
        assert "".join(re.findall(r'"(?:content|text|delta)":"(Hi there|[Hithere ])"', text)).startswith("Hi there")
        assert text.count("event: message_start") == (path == MESSAGES)
        assert text.count("event: response.created") == (path == RESPONSES)
        assert first.added[0].token_ids == second.added[0].token_ids


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_kills_two_engines_alone_is_not_given_a_third(path: str, is_streamed: bool) -> None:
    clients = [FakeClient("no", dies_at_step=0), FakeClient("no", dies_at_step=0), FakeClient("yes")]
    async with http(make_app(provider=ResumingProvider(list(clients)))) as session:
        answer = await session.post(path, json=BODIES[path] | {"stream": is_streamed})
    assert answer.status_code == 500
    assert "died twice while it ran this request and no other" in answer.text
    assert [len(client.added) for client in clients] == [1, 1, 0]
