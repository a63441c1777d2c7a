"""Background responses: readers that come back, idempotency keys, owners, and a journal that outlives the server."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.metrics.prometheus import PrometheusObserver
from quire.server.journal import JournalFolder
from quire.server.openai.responses.journal import SUFFIX, JournalEntry, ResponseJournal
from quire.types.errors import ConfigError
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, http, make_app, serving
from tests.server.openai.responses.test_responses import URL
from tests.server.waiting import WaitingClient

LIMIT = 20.0


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def until_done(session: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(LIMIT):
        while True:
            found = (await session.get(f"{URL}/{response_id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return dict(found)
            await asyncio.sleep(0.005)


async def test_a_reader_comes_back_where_it_was() -> None:
    async with serving(FakeClient("one two three four")) as session:
        whole = events_of((await session.post(URL, json={"input": "Q", "background": True, "stream": True})).text)
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[-1]["type"] == "response.completed"
        response_id = whole[0]["response"]["id"]
        for last in (-1, 0, 3, len(whole) - 1):
            rest = await session.get(f"{URL}/{response_id}", params={"stream": True, "starting_after": last})
            assert events_of(rest.text) == whole[last + 1 :]
        plain = (await session.post(URL, json={"input": "Q"})).json()["id"]
        refused = await session.get(f"{URL}/{plain}", params={"stream": True})
        assert refused.status_code == 400
        assert "ran with its client" in refused.json()["error"]["message"]


async def test_an_idempotency_key_returns_the_same_response() -> None:
    client = FakeClient("answer")
    async with serving(client) as session:
        headers = {"idempotency-key": "abc"}
        body = {"input": "Q", "background": True}
        first = (await session.post(URL, json=body, headers=headers)).json()
        again = (await session.post(URL, json=body, headers=headers)).json()
        assert again["id"] == first["id"]
        stream = await session.post(URL, json={**body, "stream": True}, headers=headers)
        assert events_of(stream.text)[0]["response"]["id"] == first["id"]
        other = (await session.post(URL, json=body, headers={"idempotency-key": "abd"})).json()
        assert other["id"] != first["id"]
        bad = await session.post(
            URL, json={"input": "Q", "metadata": {str(i): "" for i in range(17)}}, headers={"idempotency-key": "x"}
        )
        assert bad.status_code == 400
        good = await session.post(URL, json={"input": "Q"}, headers={"idempotency-key": "x"})
        assert good.json()["status"] == "completed"
    assert len(client.added) == 3


async def test_nobody_finds_the_response_of_another_key() -> None:
    app = make_app(FakeClient("answer"), api_keys=("mine", "yours"))
    async with http(app) as session:
        mine, yours = ({"authorization": f"Bearer {key}", "idempotency-key": "k"} for key in ("mine", "yours"))
        made = (await session.post(URL, json={"input": "Q"}, headers=mine)).json()["id"]
        one = f"{URL}/{made}"
        assert (await session.get(one, headers=mine)).status_code == 200
        for method, path in (("GET", one), ("DELETE", one), ("POST", f"{one}/cancel"), ("GET", f"{one}/input_items")):
            assert (await session.request(method, path, headers=yours)).status_code == 404
        chained = {"input": "Q", "previous_response_id": made}
        fresh = {"authorization": "Bearer yours"}
        assert (await session.post(URL, json=chained, headers=fresh)).status_code == 404
        assert (await session.post(URL, json={"input": "Q"}, headers=yours)).json()["id"] != made


def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    for mode in (0o755, 0o710, 0o701):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=rf"mode is 0{mode:o}.*chmod 700"):
            make_app(FakeClient("x"), journal=str(folder))
    folder.chmod(0o700)
    make_app(FakeClient("x"), journal=str(folder))


async def test_a_response_that_had_not_ended_is_finished_by_the_next_server(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    body = {"input": "Q", "background": True, "request_id": "mine:1", "metadata": {"a": "b"}}
    # A server that dies while it waits: nothing of its end is written.
    first = make_app(WaitingClient(), journal=str(folder))
    async with http(first) as session:
        begun = (await session.post(URL, json=body, headers={"idempotency-key": "abc"})).json()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    seed = json.loads(file.read_bytes())["body"]["seed"]
    client = FakeClient("the answer")
    second = make_app(client, journal=str(folder))
    for work in second.state.on_ready:
        await work()
    async with http(second) as session:
        done = await until_done(session, begun["id"])
        assert done["output"][0]["content"][0]["text"] == "the answer"
        assert (done["created_at"], done["metadata"]) == (begun["created_at"], {"a": "b"})
        again = await session.post(URL, json=body, headers={"idempotency-key": "abc"})
        assert again.json()["id"] == begun["id"]
    assert [request.params.seed for request in client.added] == [seed]
    # The one after it has the answer without running anything.
    third_client = FakeClient("another")
    third = make_app(third_client, journal=str(folder))
    for work in third.state.on_ready:
        await work()
    async with http(third) as session:
        assert (await session.get(f"{URL}/{begun['id']}")).json()["output"] == done["output"]
        assert (await session.delete(f"{URL}/{begun['id']}")).status_code == 200
    assert not third_client.added
    assert list(folder.iterdir()) == []


async def test_who_asks_before_the_engine_has_started_is_to_ask_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"journal": str(tmp_path / "journal"), "api_keys": ("mine", "yours")}
    mine, yours = ({"authorization": f"Bearer {key}"} for key in settings["api_keys"])
    async with http(make_app(WaitingClient(), **settings)) as session:
        begun = (await session.post(URL, json={"input": "Q", "background": True}, headers=mine)).json()
    second = make_app(FakeClient("the answer"), **settings)
    async with http(second) as session:
        early = await session.get(f"{URL}/{begun['id']}", headers=mine)
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert (await session.get(f"{URL}/{begun['id']}", headers=yours)).status_code == 404
        for work in second.state.on_ready:
            await work()
        assert (await session.get(f"{URL}/{begun['id']}", headers=mine)).status_code == 200


async def test_a_response_that_goes_on_is_still_its_keys_own(tmp_path: Path) -> None:
    """Outputs of one API key are never drafts for another, also if another process gives the answer."""
    journal, keys = str(tmp_path / "journal"), ("mine", "yours")
    before = WaitingClient()
    async with http(make_app(before, journal=journal, api_keys=keys)) as session:
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            body = {"input": f"from {key}", "background": True}
            assert (await session.post(URL, json=body, headers=headers)).status_code == 200
        async with asyncio.timeout(LIMIT):
            while len(before.added) < 2:
                await asyncio.sleep(0.005)
    after = FakeClient("the answer")
    second = make_app(after, journal=journal, api_keys=keys)
    for work in second.state.on_ready:
        await work()
    async with asyncio.timeout(LIMIT):
        while len(after.added) < 2:
            await asyncio.sleep(0.005)
    tenants = [{request.tenant for request in client.added} for client in (before, after)]
    assert tenants[0] == tenants[1]
    assert len(tenants[0] - {None}) == 2


async def test_a_full_disk_means_serving_without_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills up while a response is written; what was written of it is no response to the next server."""
    real = os.write

    def write(file: int, content: bytes) -> int:
        if len(content) < 40:
            raise OSError(28, "No space left on device")
        return real(file, content[:20])

    observer = PrometheusObserver(MODEL)
    app = make_app(FakeClient("answer"), journal=str(tmp_path / "journal"), observer=observer)
    async with http(app) as session:
        with monkeypatch.context() as patch:
            patch.setattr("quire.server.journal.os.write", write)
            begun = (await session.post(URL, json={"input": "Q", "background": True})).json()
            assert (await until_done(session, begun["id"]))["status"] == "completed"
            assert (await session.get(f"{URL}/{begun['id']}")).json()["output"][0]["content"][0]["text"] == "answer"
    assert f"{begun['id']} is served without the journal: [Errno 28]" in caplog.text
    assert b'quire:journal_failures_total{model_name="%s"} 1.0' % MODEL.encode() in observer.expose()[0]
    assert ResponseJournal(JournalFolder(tmp_path / "journal", SUFFIX, 100.0)).read() == []


async def test_a_folder_that_cannot_be_made_means_serving_without_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with serving(FakeClient("answer"), journal=str(tmp_path / "file" / "journal")) as session:
        begun = (await session.post(URL, json={"input": "Q", "background": True})).json()
        assert (await until_done(session, begun["id"]))["status"] == "completed"
    assert "is served without the journal" in caplog.text


async def test_files_go_while_the_server_runs_and_hold_no_key(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    app = make_app(WaitingClient(), journal=str(folder), journal_ttl=0.05, api_keys=("secret-key",))
    async with http(app) as session:
        headers = {"authorization": "Bearer secret-key"}
        await session.post(URL, json={"input": "Q", "background": True}, headers=headers)
        (file,) = folder.iterdir()
        assert b"secret-key" not in file.read_bytes()
        async with asyncio.timeout(LIMIT):
            while list(folder.iterdir()):
                await asyncio.sleep(0.01)


def test_torn_and_old_files_are_left_out(tmp_path: Path) -> None:
    failures: list[int] = []
    journal = ResponseJournal(JournalFolder(tmp_path, SUFFIX, 100.0, lambda: failures.append(1)))
    for number in range(3):
        journal.open(JournalEntry(f"resp_{number}", "", None, number, {"input": "Q"}, [], []))
    assert [found.entry.response_id for found in journal.read()] == ["resp_0", "resp_1", "resp_2"]
    torn, old = (journal.folder._path(name) for name in ("resp_0", "resp_1"))
    torn.write_bytes(torn.read_bytes()[:-4])
    os.utime(old, (1.0, 1.0))
    assert [found.entry.response_id for found in journal.read()] == ["resp_2"]
    assert not old.exists()
    assert not failures
