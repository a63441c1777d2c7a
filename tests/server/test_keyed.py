"""Requests with an Idempotency-Key: sent again they return what the first one runs, also from the next server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import http, make_app
from tests.server.waiting import BODIES, CHAT, COMPLETIONS, RESPONSES, WaitingClient

LIMIT = 20.0
ROUTES = (CHAT, COMPLETIONS, RESPONSES)
KEY = {"idempotency-key": "abc"}


def post(session: httpx.AsyncClient, route: str, headers: dict[str, str] = KEY, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(session.post(route, json={**BODIES[route], **fields}, headers=headers))


async def until_added(client: FakeClient, number: int) -> None:
    async with asyncio.timeout(LIMIT):
        while len(client.added) < number:
            await asyncio.sleep(0.005)


def seed_of(client: FakeClient) -> int | None:
    params = client.added[0].params
    assert isinstance(params, SamplingParams)
    return params.seed


async def next_app(client: FakeClient, **settings: Any) -> FastAPI:
    app = make_app(client, **settings)
    for work in app.state.on_ready:
        await work()
    return app


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_the_running_request_is_returned(route: str, stream: bool) -> None:
    """To whoever asks while it runs, and after it; and it does not end with its first client."""
    client = WaitingClient("one two three")
    async with http(make_app(client)) as session:
        first, second = post(session, route, stream=stream), post(session, route, stream=stream)
        await until_added(client, 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        third = post(session, route, stream=stream)
        client.go_on()
        answers = [await second, await third, await post(session, route, stream=stream)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len({answer.text for answer in answers}) == 1
        assert len({answer.headers["content-type"] for answer in answers}) == 1
        assert len(client.added) == 1
        assert seed_of(client) is not None
        assert not client.aborted
        other = await post(session, route, {"idempotency-key": "abd"}, stream=stream)
        assert other.json()["id"] != answers[0].json()["id"] if not stream else other.text != answers[0].text
        assert len(client.added) == 2


@pytest.mark.parametrize("route", ROUTES)
async def test_a_key_is_of_one_request_and_one_owner(route: str) -> None:
    client = FakeClient("answer")
    async with http(make_app(client, api_keys=("mine", "yours"))) as session:
        mine, yours = ({**KEY, "authorization": f"Bearer {key}"} for key in ("mine", "yours"))
        first = await post(session, route, mine)
        assert first.status_code == 200
        assert (await post(session, route, yours)).json()["id"] != first.json()["id"]
        refused = await post(session, route, mine, temperature=0.5)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "Idempotency-Key"
        assert "give another key" in refused.json()["error"]["message"]
        too_long = await post(session, route, {**mine, "idempotency-key": "k" * 300})
        assert too_long.status_code == 400
        assert "at most 255 characters" in too_long.json()["error"]["message"]
    assert len(client.added) == 2


@pytest.mark.parametrize("route", ROUTES)
async def test_a_failure_is_not_kept(route: str) -> None:
    """The next request under the key runs."""
    client = WaitingClient("answer")
    async with http(make_app(client)) as session:
        bad = await post(session, route, temperature=-1.0)
        assert bad.status_code == 400
        one, two = post(session, route, temperature=0.5), post(session, route, temperature=0.5)
        await until_added(client, 1)
        client.refuse("it is too hard", "prompt")
        assert [(await answer).status_code for answer in (one, two)] == [400, 400]
        assert (await post(session, route)).status_code == 200
    assert len(client.added) == 2


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_fails_is_not_kept(route: str, tmp_path: Path) -> None:
    client = FakeClient("a longer answer", dies_at_step=5)
    async with http(make_app(client, journal=str(tmp_path))) as session:
        failed = await post(session, route, stream=True)
        assert failed.status_code == 200
        assert "the fake engine died" in failed.text
        assert (await post(session, route, stream=True)).status_code == 500  # there is no engine to run it
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_the_next_server_answers(route: str, stream: bool, tmp_path: Path) -> None:
    journal, keys = str(tmp_path / "journal"), ("mine", "yours")
    headers = {**KEY, "authorization": "Bearer mine"}
    before = WaitingClient()
    async with http(make_app(before, journal=journal, api_keys=keys)) as session:
        asked = post(session, route, headers, stream=stream)
        await until_added(before, 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    (file,) = (tmp_path / "journal").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"mine" not in file.read_bytes()
    client = FakeClient("the answer")
    app = make_app(client, journal=journal, api_keys=keys)
    async with http(app) as session:
        early = post(session, route, headers, stream=stream)  # before the engine is there
        await asyncio.sleep(0)
        assert not client.added
        for work in app.state.on_ready:
            await work()
        answer = await early
        assert answer.status_code == 200
        assert (await post(session, route, headers, stream=stream)).text == answer.text
    (request,) = client.added
    assert seed_of(client) == seed_of(before)
    assert request.tenant == before.added[0].tenant
    # The one after it has the answer without running anything, and gives it to nobody else.
    idle = FakeClient("another")
    async with http(await next_app(idle, journal=journal, api_keys=keys)) as session:
        again = await post(session, route, headers, stream=stream)
        assert (again.text, again.headers["content-type"]) == (answer.text, answer.headers["content-type"])
        assert not idle.added
        other = {**KEY, "authorization": "Bearer yours"}
        assert (await post(session, route, other, stream=stream)).text != answer.text
    assert len(idle.added) == 1


async def test_answers_are_bounded_and_their_files_go(tmp_path: Path) -> None:
    client = FakeClient("answer")
    journal = tmp_path / "journal"
    app = make_app(client, max_stored_responses=2, journal=str(journal), journal_ttl=0.05)
    async with http(app) as session:
        for key in "abcab":
            assert (await post(session, CHAT, {"idempotency-key": key})).status_code == 200
        assert len(client.added) == 5  # a was pushed out by c, and b by a
        async with asyncio.timeout(LIMIT):
            while list(journal.iterdir()):
                await asyncio.sleep(0.01)


async def test_a_file_that_cannot_be_used_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = tmp_path / "journal"
    journal.mkdir(mode=0o700)
    before = WaitingClient()
    async with http(make_app(before, journal=str(journal))) as session:
        post(session, CHAT).cancel()
        asked = post(session, CHAT)
        await until_added(before, 1)
        asked.cancel()
    (file,) = journal.iterdir()
    entry = json.loads(file.read_bytes())
    file.write_bytes(json.dumps({**entry, "body": {"messages": 3}}).encode() + b"\n")
    client = FakeClient("answer")
    async with http(await next_app(client, journal=str(journal))) as session:
        assert "cannot go on" in caplog.text
        assert (await post(session, CHAT)).status_code == 200
    assert len(client.added) == 1
