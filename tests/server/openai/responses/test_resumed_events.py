"""Streams of background responses over the death of the server: each event keeps its number and its content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from quire.config.groups import ServerConfig
from quire.server.tool_servers import make_tool_servers
from quire.types.outputs import EngineOutputs
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import http, make_app
from tests.server.mcp_loopback import LABEL, http_server
from tests.server.openai.responses.test_journal import LIMIT, events_of, until_done
from tests.server.openai.responses.test_responses import URL, WEATHER
from tests.server.scripted import TEXT, ScriptedClient, ScriptedProvider

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWER = f"<think>Hm 🙂.</think>Let me see. 🙂🙂 {CALL}"
SETTINGS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
TOLD = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
BODIES = {"plain": {}, "logprobs": TOLD, "call": {"tools": [WEATHER]}, "stop": {"stop": "Köln"}}


class KilledClient(ScriptedClient):
    """Falls silent after a number of steps, as the engine of a server that is killed then."""

    def __init__(self, scripts: Any, num_steps: int, **options: Any) -> None:
        super().__init__(scripts, **options)
        self._steps_left = num_steps
        self.is_silent = asyncio.Event()

    async def get_outputs_async(self) -> EngineOutputs:
        if not self._steps_left:
            self.is_silent.set()
            await asyncio.Event().wait()
        found = await super().get_outputs_async()
        self._steps_left -= 1
        return found


def app_of(client: ScriptedClient, journal: Path, **settings: Any) -> FastAPI:
    return make_app(provider=ScriptedProvider(client, TEXT), journal=str(journal), **{**SETTINGS, **settings})


async def next_app(client: ScriptedClient, journal: Path, **settings: Any) -> FastAPI:
    app = app_of(client, journal, **settings)
    for work in app.state.on_ready:
        await work()
    return app


async def events_so_far(app: FastAPI, response_id: str) -> list[dict[str, Any]]:
    """What a reader has heard when the server has no more to say."""
    heard: list[bytes] = []

    async def send(message: Message) -> None:
        heard.append(message.get("body", b""))

    async def receive() -> Message:
        if not asked:
            await asyncio.Event().wait()
        return asked.pop()

    asked: list[Message] = [{"type": "http.request", "body": b""}]
    path, query = f"{URL}/{response_id}", b"stream=true"
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": [(b"host", b"x")]}
    reading = asyncio.ensure_future(app(scope, receive, send))
    for _ in range(100):  # turns of the loop
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return events_of(b"".join(heard).decode())


async def read_events(session: httpx.AsyncClient, response_id: str, last: int = -1) -> list[dict[str, Any]]:
    rest = await session.get(f"{URL}/{response_id}", params={"stream": True, "starting_after": last})
    assert rest.status_code == 200, rest.text
    return events_of(rest.text)


async def ask_and_die(app: FastAPI, client: KilledClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that a client has of a response when its server dies."""
    async with http(app) as session:
        begun = (await session.post(URL, json={"input": "Q", "background": True, **body})).json()["id"]
    await asyncio.wait_for(client.is_silent.wait(), LIMIT)
    known = await events_so_far(app, begun)
    assert len(known) >= 2
    return known


@pytest.mark.parametrize("num_steps", [1, 11, 20])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_events_keep_their_numbers_in_the_next_server(
    tmp_path: Path, body: dict[str, Any], num_steps: int
) -> None:
    """However each engine cuts its answer into steps."""
    first = KilledClient(ANSWER, num_steps, chunk=2)
    known = await ask_and_die(app_of(first, tmp_path), first, body)
    begun = known[0]["response"]["id"]
    client = ScriptedClient(ANSWER, chunk=5)
    async with http(await next_app(client, tmp_path)) as session:
        done = await until_done(session, begun)
        whole = await read_events(session, begun)
        assert whole[: len(known)] == known
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[-1]["response"] == done
        assert await read_events(session, begun, len(known) - 1) == whole[len(known) :]
        alone = (await session.post(URL, json={"input": "Q", **body})).json()
        assert _comparable(done["output"]) == _comparable(alone["output"])
        if body is TOLD:
            (said,) = done["output"][1]["content"]
            told = bytes(byte for entry in said["logprobs"] for byte in entry["bytes"])
            assert said["text"].encode() in told
        assert done["usage"] == alone["usage"]
    resumed = [request.num_given_outputs for request in client.added[:-1]]
    assert resumed in ([2 * num_steps], [])  # none: the answer had ended, and nobody had been told
    # The server after that has all events without an engine.
    idle = ScriptedClient("another")
    async with http(await next_app(idle, tmp_path)) as session:
        assert await read_events(session, begun) == whole
        assert await read_events(session, begun, 3) == whole[4:]
    assert not idle.added


async def test_every_death_is_survived(tmp_path: Path) -> None:
    """Five servers, each of which says a little more."""
    known: list[dict[str, Any]] = []
    for life in range(5):
        client = KilledClient(ANSWER, 5 + life, chunk=1 + life % 3)
        if not known:
            known = await ask_and_die(app_of(client, tmp_path), client, {})
            continue
        app = await next_app(client, tmp_path)
        await asyncio.wait_for(client.is_silent.wait(), LIMIT)
        heard = await events_so_far(app, known[0]["response"]["id"])
        assert heard[: len(known)] == known
        assert len(heard) > len(known)
        known = heard
    async with http(await next_app(ScriptedClient(ANSWER), tmp_path)) as session:
        done = await until_done(session, known[0]["response"]["id"])
        whole = await read_events(session, done["id"])
    assert whole[: len(known)] == known
    assert done["usage"]["output_tokens"] == len(ANSWER.encode()) + 1


async def test_calls_of_tool_servers_are_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results are in the journal; and so are conversations that no later server remembers."""
    add = '<tool_call>\n{"name": "loop__add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    with http_server() as url:
        settings: dict[str, Any] = {"tool_server": (f"{LABEL}={url}",)}
        servers = make_tool_servers(ServerConfig(**settings))
        first = KilledClient([add, "It is really 3."], len(add) + 1 + 6)
        app = app_of(first, tmp_path, tool_servers=servers, **settings)
        body = {"tools": [{"type": "mcp", "server_label": LABEL}]}
        known = await ask_and_die(app, first, body)
        assert known[-1]["type"] == "response.output_text.delta"
        begun = known[0]["response"]["id"]
        called: list[object] = []

        async def call(*arguments: object) -> None:
            called.append(arguments)

        monkeypatch.setattr(servers, "call", call)
        second = ScriptedClient("It is really 3.", chunk=4)
        async with http(await next_app(second, tmp_path, tool_servers=servers, **settings)) as session:
            done = await until_done(session, begun)
            whole = await read_events(session, begun)
        await servers.close()
    assert whole[: len(known)] == known
    assert [item["type"] for item in done["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert done["output"][1]["output"] == "1 and 2 make 3"
    assert done["output"][2]["content"][0]["text"] == "It is really 3."
    assert not called
    assert len(second.added) == 1


async def test_what_was_said_before_is_in_the_journal(tmp_path: Path) -> None:
    first = ScriptedClient("one")
    app = app_of(first, tmp_path)
    async with http(app) as session:
        before = (await session.post(URL, json={"input": "First"})).json()["id"]  # in memory alone
    killed = KilledClient("the answer", 3)
    app.state.context.provider.__init__(killed, TEXT)
    known = await ask_and_die(app, killed, {"previous_response_id": before})
    client = ScriptedClient("the answer")
    async with http(await next_app(client, tmp_path)) as session:
        done = await until_done(session, known[0]["response"]["id"])
        assert (await read_events(session, done["id"]))[: len(known)] == known
    (prompt,) = client.prompts
    assert prompt.startswith("[user]First\n[assistant]one\n[user]Q\n[assistant]")


def _torn(content: bytes) -> bytes:
    return content[:-7]


def _foreign(content: bytes) -> bytes:
    return content + b'{"type": "of another version"}\n'


@pytest.mark.parametrize("damage", [_torn, _foreign])
async def test_a_line_that_cannot_be_read_is_left_out(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    first = KilledClient("the answer", 4)
    known = await ask_and_die(app_of(first, tmp_path), first, {})
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    client = ScriptedClient("the answer")
    async with http(await next_app(client, tmp_path)) as session:
        done = await until_done(session, known[0]["response"]["id"])
        whole = await read_events(session, done["id"])
    assert done["output"][0]["content"][0]["text"] == "the answer"
    assert whole[: len(known) - 1] == known[:-1]


async def test_a_disk_that_fills_up_ends_the_record_of_a_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written is no use to a later server, whose events would have other numbers."""
    client = FakeClient("answer")
    writes: list[int] = []

    def write(file: int, content: bytes) -> int:
        writes.append(len(content))
        if len(writes) == 4:
            raise OSError(28, "No space left on device")
        return len(content)

    monkeypatch.setattr("quire.server.journal.os.write", write)
    async with http(make_app(client, journal=str(tmp_path))) as session:
        begun = (await session.post(URL, json={"input": "Q", "background": True})).json()["id"]
        assert (await until_done(session, begun))["status"] == "completed"
    assert len(writes) == 4
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("is served without the journal: [Errno 28]") == 1


def _comparable(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items but for their ids, and log-probabilities, which may have some of tokens around the text."""
    copies: list[dict[str, Any]] = json.loads(json.dumps(output))
    for item in copies:
        item["id"] = item["call_id"] = None
        for part in item.get("content", ()):
            part["logprobs"] = None
    return copies
