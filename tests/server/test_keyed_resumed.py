"""Requests with an Idempotency-Key over the death of the server: the next one goes on after what was recorded."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from quire.server import journal as journal_module
from quire.server.journal import held_folder
from quire.types.errors import ConfigError
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.server.helpers import http, make_app
from tests.server.openai.responses.test_responses import WEATHER as FLAT_WEATHER
from tests.server.openai.responses.test_resumed_events import KilledClient
from tests.server.scripted import TEXT, ScriptedClient, ScriptedProvider
from tests.server.waiting import CHAT, COMPLETIONS, HELLO, RESPONSES

LIMIT = 20.0
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWER = f"<think>Hm 🙂.</think>Let me see. 🙂🙂 {CALL}"
OTHER = "<think>Well.</think>Another answer, which is the longer one of the two, so that it ends last. " * 2
WEATHER = {"type": "function", "function": {key: value for key, value in FLAT_WEATHER.items() if key != "type"}}
SETTINGS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ASK = {"messages": HELLO, "seed": 3}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, ASK),
    "chat-call": (CHAT, {**ASK, "tools": [WEATHER], "n": 2}),
    "chat-logprobs": (CHAT, {**ASK, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}),
    "chat-stop": (CHAT, {**ASK, "stop": "Köln"}),
    "chat-prompt_logprobs": (CHAT, {**ASK, "prompt_logprobs": 1, "n": 2}),
    "completion": (COMPLETIONS, {"prompt": "Hello", "seed": 3, "logprobs": 2}),
    "completion-prompts": (COMPLETIONS, {"prompt": ["Hello", "Yes", "No"], "seed": 3, "n": 2, "logprobs": 1}),
    "completion-echo": (COMPLETIONS, {"prompt": ["Hello", "Yes"], "seed": 3, "echo": True, "logprobs": 1}),
    "responses": (RESPONSES, {"input": "Hello", "seed": 3, "include": ["message.output_text.logprobs"]}),
    "responses-call": (RESPONSES, {"input": "Hello", "seed": 3, "tools": [FLAT_WEATHER]}),
}
NAMED = {"idempotency-key": "once", "x-request-id": "chosen"}


class ByCompletion(KilledClient):
    """The first completion of a prompt says one script, the second another, in every process."""

    def __init__(self, num_steps: int = 1 << 30, **options: Any) -> None:
        super().__init__("", num_steps, **options)

    def _say(self, request: EngineRequest) -> Sequence[int]:
        params = request.params
        assert isinstance(params, SamplingParams)
        return self._tokenizer.encode(ANSWER if params.seed == 3 else OTHER, add_special_tokens=False)


def app_of(client: ScriptedClient, journal: Path | None, **settings: Any) -> FastAPI:
    name = None if journal is None else str(journal)
    return make_app(provider=ScriptedProvider(client, TEXT), journal=name, **{**SETTINGS, **settings})


async def next_app(client: ScriptedClient, journal: Path | None, **settings: Any) -> FastAPI:
    app = app_of(client, journal, **settings)
    for work in app.state.on_ready:
        await work()
    return app


class Asking:
    """A client that stays, of which a test can see what it has heard so far."""

    def __init__(self, app: FastAPI, route: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.heard = b""
        self._messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        names = {"host": "x", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": route,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def _send(self, message: Message) -> None:
        self.heard += message.get("body", b"")

    async def until_silent(self) -> None:
        for _ in range(200):  # turns of the loop
            await asyncio.sleep(0)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def comparable(answer: bytes) -> str:
    """Of two servers that were asked apart from each other: times and random names differ."""
    text = re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', answer.decode())
    text = re.sub(r"(call_)[A-Za-z0-9]{24}", r"\1X", text)
    return re.sub(r"chosen-[0-9a-f]{8}|[0-9a-f]{32}", "ID", text)


def by_choice(stream: bytes) -> dict[int, tuple[str, str, list[float]]]:
    """Of each choice its text, how it ended and its log-probabilities."""
    found: dict[int, tuple[str, str, list[float]]] = {}
    for line in stream.decode().splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            text, end, values = found.get(choice["index"], ("", "", []))
            new = (choice["logprobs"] or {}).get("token_logprobs", [])
            found[choice["index"]] = text + choice["text"], end + (choice["finish_reason"] or ""), values + new
    return found


async def ask(app: FastAPI, route: str, body: dict[str, Any], headers: dict[str, str] = NAMED) -> bytes:
    async with http(app) as session:
        answer = await asyncio.wait_for(session.post(route, json=body, headers=headers), LIMIT)
    assert answer.status_code == 200, answer.text
    return answer.content


async def ask_and_die(journal: Path, route: str, body: dict[str, Any], num_steps: int) -> tuple[bytes, ByCompletion]:
    client = ByCompletion(num_steps, chunk=2)
    asking = Asking(app_of(client, journal), route, body, NAMED)
    await asyncio.wait_for(client.is_silent.wait(), LIMIT)
    await asking.until_silent()
    return asking.heard, client


@pytest.mark.parametrize("num_steps", [1, 11, 33])
@pytest.mark.parametrize(
    ("request_name", "stream"),
    [(name, stream) for name in REQUESTS for stream in (False, True) if not (stream and "prompt_logprobs" in name)],
)
async def test_the_next_server_goes_on(tmp_path: Path, request_name: str, stream: bool, num_steps: int) -> None:
    """The same bytes as without the death, and those that were heard before it are their beginning."""
    route, body = REQUESTS[request_name]
    body = {**body, "stream": stream, "max_tokens" if route != RESPONSES else "max_output_tokens": 120, **body}
    one_prompt = not isinstance(body.get("prompt"), list)
    if stream and one_prompt and route != RESPONSES:
        body.update(USAGE)
    alone = await ask(await next_app(ByCompletion(chunk=2), None), route, body)
    heard, first = await ask_and_die(tmp_path, route, body, num_steps)
    assert bool(heard) == stream
    client = ByCompletion(chunk=2)
    answer = await ask(await next_app(client, tmp_path), route, body)
    assert answer.startswith(heard.removesuffix(b"data: [DONE]\n\n"))
    if one_prompt or not stream:
        assert comparable(answer) == comparable(alone)
    else:  # streams of several prompts are interleaved by chance
        assert by_choice(answer) == by_choice(alone)
    given = [request.num_given_outputs for request in client.added]
    assert set(given) <= {2 * num_steps} if one_prompt else sum(given) > 0
    assert len(client.added) <= len(first.added)
    idle = ByCompletion()
    assert await ask(await next_app(idle, tmp_path), route, body) == answer
    assert not idle.added


async def test_every_death_is_survived(tmp_path: Path) -> None:
    """Also with torn lines at the end of what each server left."""
    route, body = REQUESTS["chat-call"]
    body = {**body, "stream": True, "max_tokens": 120}
    alone = await ask(await next_app(ByCompletion(chunk=2), None), route, body)
    heard, _ = await ask_and_die(tmp_path, route, body, 3)
    num_known = [0]
    for _ in range(4):
        (file,) = tmp_path.iterdir()
        with file.open("ab") as torn:
            torn.write(b'{"type":"said","completions":[{"token_i')
        client = ByCompletion(5, chunk=2)
        asking = Asking(await next_app(client, tmp_path), route, body, NAMED)
        await asyncio.wait_for(client.is_silent.wait(), LIMIT)
        await asking.until_silent()
        assert asking.heard.startswith(heard)
        assert len(asking.heard) > len(heard)
        heard = asking.heard
        num_known.append(client.added[0].num_given_outputs)
    assert num_known == [0, 6, 16, 26, 36]
    answer = await ask(await next_app(ByCompletion(chunk=2), tmp_path), route, body)
    assert answer.startswith(heard)
    assert comparable(answer) == comparable(alone)


async def test_what_was_said_before_goes_with_it(tmp_path: Path) -> None:
    """A response that follows one in the memory of the dead server."""
    client = ByCompletion(1000, chunk=2)
    app = app_of(client, tmp_path)
    before = json.loads(await ask(app, RESPONSES, {"input": "First", "seed": 3}, {}))
    body = {"input": "Second", "previous_response_id": before["id"], "seed": 3, "stream": True}
    client._steps_left = 5
    asking = Asking(app, RESPONSES, body, NAMED)
    await asyncio.wait_for(client.is_silent.wait(), LIMIT)
    await asking.until_silent()
    client = ByCompletion(chunk=2)
    answer = await ask(await next_app(client, tmp_path), RESPONSES, body)
    assert answer.startswith(asking.heard)
    assert b"response.completed" in answer
    (request,) = client.added
    assert "First" in client.prompt_of(request)


async def test_a_full_disk_in_the_middle_costs_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    route, body = REQUESTS["chat"]
    write, num_written = os.write, 0

    def full(file: int, content: Any) -> int:
        nonlocal num_written
        num_written += 1
        if num_written == 5:
            return write(file, content[:10])  # a part of it
        if num_written > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content)

    monkeypatch.setattr(journal_module.os, "write", full)
    answer = json.loads(await ask(app_of(ByCompletion(chunk=2), tmp_path), route, body))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert caplog.text.count("is served without the journal") == 1
    assert list(tmp_path.iterdir()) == []


async def test_files_left_by_the_process_before_go(tmp_path: Path) -> None:
    """Of answers too, and of those that it was about to write."""
    route, body = REQUESTS["chat"]
    await ask(app_of(ByCompletion(), tmp_path), route, body)
    (file,) = tmp_path.iterdir()
    (tmp_path / f"{file.name}.tmp").write_bytes(b"half an answer")
    await next_app(ByCompletion(), tmp_path, journal_ttl=1.0)
    assert list(tmp_path.iterdir()) == [file]
    async with asyncio.timeout(LIMIT):
        while list(tmp_path.iterdir()):
            await asyncio.sleep(0.02)


async def test_answers_of_the_process_before_are_bounded(tmp_path: Path) -> None:
    route, body = REQUESTS["chat"]
    app = app_of(ByCompletion(), tmp_path)
    for key in "abcd":
        await ask(app, route, body, {"idempotency-key": key})
    client = ByCompletion()
    app = await next_app(client, tmp_path, max_stored_responses=2)
    assert len(list(tmp_path.iterdir())) == 2
    for key in "cd":
        await ask(app, route, body, {"idempotency-key": key})
    assert not client.added


def test_one_server_has_a_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two would go on with the same requests."""
    folder = tmp_path / "journal"
    with held_folder(str(folder)):
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match="another server uses"), held_folder(str(folder)):
            pass
    with held_folder(str(folder)), held_folder(None):
        assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with held_folder(str(tmp_path / "file" / "journal")):
        assert "is not locked" in caplog.text


async def test_nothing_is_recorded_without_a_journal() -> None:
    """The engine's outputs of a request that is not streamed are one."""
    client = ByCompletion()
    await ask(app_of(client, None), *REQUESTS["chat"])
    params = client.added[0].params
    assert isinstance(params, SamplingParams)
    assert params.output_kind == "final_only"
