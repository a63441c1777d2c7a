"""Responses that are cancelled, deleted, left by their client, too large, or a stranger's: nothing is left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, LiveServer, http, live_server, long_client, make_app, serving
from tests.server.openai.responses.test_responses import CALL, URL, WEATHER, ask, prompt_of, sdk
from tests.server.scripted import ScriptedClient, ScriptedProvider, scripted_text

ENDLESS = "x" * 500_000
KEYS = ("secret",)
ROUTES = [
    ("POST", URL),
    ("GET", f"{URL}/resp_1"),
    ("DELETE", f"{URL}/resp_1"),
    ("POST", f"{URL}/resp_1/cancel"),
    ("GET", f"{URL}/resp_1/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
]


def idle_tasks(server: LiveServer) -> set[str]:
    """The names of the tasks on the server's loop."""

    async def names() -> set[str]:
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    return asyncio.run_coroutine_threadsafe(names(), server.loop).result()


def asking(text: str, path: str, max_tokens: int) -> dict[str, Any]:
    if path == URL:
        return {"input": text, "max_output_tokens": max_tokens}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


@pytest.mark.parametrize("path", [URL, "/v1/messages"])
def test_a_stream_that_its_client_leaves_is_aborted_and_not_stored(path: str) -> None:
    client = long_client(ENDLESS)
    with live_server(client) as server:
        body = asking("Long", path, 400_000)
        with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=20) as answer:
            lines = answer.iter_lines()
            assert next(lines) in ("event: response.created", "event: message_start")
            first = json.loads(next(lines).removeprefix("data: "))
        server.wait_until(lambda: not client.has_unfinished())
        assert client.aborted == [client.added[0].request_id]
        if path == URL:
            assert httpx.get(f"{server.url}{URL}/{first['response']['id']}").status_code == 404
        assert not any("resp_" in name for name in idle_tasks(server))


def test_a_client_that_leaves_before_the_answer_is_aborted() -> None:
    client = long_client(ENDLESS)
    with live_server(client) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + URL, json={"input": "Long"}, timeout=httpx.Timeout(20, read=0.3))
        server.wait_until(lambda: bool(client.added) and not client.has_unfinished())
        assert client.aborted == [client.added[0].request_id]


def test_deleting_a_running_response_stops_it() -> None:
    client = long_client(ENDLESS)
    with live_server(client) as server, sdk(server) as user:
        responses = user.responses
        queued = responses.create(model=MODEL, input="Long", background=True)
        server.wait_until(lambda: client.has_unfinished())
        with pytest.raises(openai.BadRequestError, match="still"):
            responses.create(model=MODEL, input="More", previous_response_id=queued.id)
        responses.delete(queued.id)
        server.wait_until(lambda: not client.has_unfinished())
        for ask_for in (responses.retrieve, responses.cancel, responses.delete):
            with pytest.raises(openai.NotFoundError, match=queued.id):
                ask_for(queued.id)
        assert queued.id not in idle_tasks(server)


def test_an_engine_that_dies_fails_what_runs_in_the_background() -> None:
    with live_server(FakeClient("Hello", dies_at_step=2)) as server, sdk(server) as client:
        responses = client.responses
        queued = responses.create(model=MODEL, input="x", background=True)
        server.wait_until(lambda: queued.id not in {task.get_name() for task in asyncio.all_tasks(server.loop)})
        failed = responses.retrieve(queued.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "died" in failed.error.message


async def test_the_store_is_bounded_in_bytes() -> None:
    async with serving(FakeClient("x"), max_stored_bytes=3000) as session:
        ids = [(await session.post(URL, json={"input": str(i)})).json()["id"] for i in range(9)]
        found = [(await session.get(f"{URL}/{response_id}")).status_code for response_id in ids]
        assert found == sorted(found, reverse=True)  # the oldest went, the newest stayed
        assert {404, 200} == set(found)
        huge = await session.post(URL, json={"input": "x", "instructions": "y" * 300, "metadata": {"a": "z" * 4000}})
        assert huge.status_code == 200
        assert (await session.get(f"{URL}/{huge.json()['id']}")).status_code == 404
        assert (await session.get(f"{URL}/{ids[-1]}")).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_strangers_are_refused(method: str, path: str) -> None:
    async with serving(FakeClient("x"), api_keys=KEYS) as session:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await session.request(method, path, json={"input": "x"}, headers=headers)
            assert answer.status_code == 401
            assert "key" in answer.json()["error"]["message"]
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            answer = await session.request(method, path, json={"input": "x"}, headers=headers)
            assert answer.status_code != 401


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if "resp_1" in route[1]])
async def test_unknown_ids_are_named(method: str, path: str) -> None:
    async with serving(FakeClient("x")) as session:
        answer = await session.request(method, path, json={})
        assert answer.status_code == 404
        assert "'resp_1'" in answer.json()["error"]["message"]
        page = await session.post(URL, json={"input": "x"})
        missing = await session.get(f"{URL}/{page.json()['id']}/input_items?after=item_x")
        assert missing.status_code == 404


@pytest.mark.parametrize("path", [URL, "/v1/messages", "/v1/messages/count_tokens"])
async def test_bodies_and_prompts_that_are_too_large(path: str) -> None:
    client = FakeClient("x")
    body = asking("y" * 3000, path, 5)
    async with serving(client, max_body_bytes=20_000) as session:
        answer = await session.post(path, json=body | {"metadata": {"a": "z" * 30_000}})
        assert answer.status_code == 413
        assert "20000" in answer.json()["error"]["message"]
        answer = await session.post(path, json=body)
        if "count" in path:
            assert answer.json()["input_tokens"] > 3000
        else:
            assert answer.status_code == 400
            assert any(limit in answer.json()["error"]["message"] for limit in ("512 tokens", "511 maximum"))
    assert client.added == []


async def test_an_item_may_refer_to_one_that_was_stored() -> None:
    client = long_client(f"Let me see.{CALL}")
    async with serving(client) as session:
        first = (await session.post(URL, json={"input": "Rain?", "tools": [WEATHER]})).json()
        text, called = first["output"]
        items = [
            {"role": "user", "content": "Rain?"},
            {"type": "item_reference", "id": text["id"]},
            {"type": "item_reference", "id": called["id"]},
            {"type": "function_call_output", "call_id": called["call_id"], "output": "sunny"},
        ]
        answer = await session.post(URL, json={"input": items, "tools": [WEATHER]})
        assert answer.status_code == 200, answer.text
        for part in ("Rain?", "Let me see.", "Köln", "sunny"):
            assert part in prompt_of(client)
        unknown = await session.post(URL, json={"input": [{"type": "item_reference", "id": "msg_nobody_0"}]})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["param"] == "input[0].id"


async def test_a_call_that_was_cut_short_is_left_out_of_what_follows() -> None:
    client = long_client(CALL)
    async with serving(client) as session:
        cut = (await session.post(URL, json={"input": "Q", "tools": [WEATHER], "max_output_tokens": 60})).json()
        assert cut["output"][0]["status"] == "incomplete"
        again = await session.post(URL, json={"input": "Go on", "previous_response_id": cut["id"]})
        assert again.status_code == 200, again.text
    assert "Go on" in prompt_of(client)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].server_label"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ],
)
async def test_what_is_refused_names_the_field(body: dict[str, Any], field: str) -> None:
    answer = await ask(FakeClient("x"), _status=400, **body)
    assert answer["error"]["param"] == field


@pytest.mark.parametrize("settings", [{"max_stored_responses": 0}, {"max_stored_bytes": 100}])
async def test_nothing_runs_in_the_background_that_nobody_could_ask_for(settings: dict[str, Any]) -> None:
    client = FakeClient("x")
    async with serving(client, **settings) as session:
        answer = await session.post(URL, json={"input": "Hello", "background": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "background"
    assert not client.added


async def test_hints_reach_neither_the_cache_nor_the_prompt() -> None:
    client = FakeClient("x")
    hints = {"prompt_cache_key": "key", "service_tier": "flex", "user": "u", "safety_identifier": "s"}
    async with serving(client) as session:
        for extra in ({}, hints, {"cache_salt": "mine"}):
            answer = await session.post(URL, json={"input": "Hello", **extra})
            assert answer.json()["status"] == "completed"
            assert answer.json()["prompt_cache_key"] == extra.get("prompt_cache_key")
    plain, hinted, salted = client.added
    assert plain.token_ids == hinted.token_ids
    assert plain.cache_salt == hinted.cache_salt
    assert salted.cache_salt != plain.cache_salt


async def test_effort_none_asks_the_template_not_to_think() -> None:
    text = scripted_text("{{ messages[0].content }} thinks: {{ enable_thinking }}, effort: {{ reasoning_effort }}")
    client = ScriptedClient("x", text)
    async with http(make_app(provider=ScriptedProvider(client, text))) as session:
        for effort in ("none", "high"):
            answer = await session.post(URL, json={"input": "Q", "reasoning": {"effort": effort}})
            assert answer.json()["reasoning"] == {"effort": effort}
    assert client.prompts == ["Q thinks: False, effort: ", "Q thinks: True, effort: high"]
