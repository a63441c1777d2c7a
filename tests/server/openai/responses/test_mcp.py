"""Responses whose model calls tool servers: the loop of turns, its events, its limits, and servers that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from quire.config.groups import ServerConfig
from quire.server.tool_servers import make_tool_servers
from tests.server.helpers import http, make_app
from tests.server.mcp_loopback import LABEL, http_server
from tests.server.openai.responses.test_responses import URL, WEATHER, comparable, parse_stream
from tests.server.scripted import TEXT, Script, ScriptedClient, ScriptedProvider

MCP = {"type": "mcp", "server_label": LABEL}


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


ADD = call("loop__add", a=1, b=2)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as address:
        yield address


@asynccontextmanager
async def serving(scripts: Script | Sequence[Script], url: str, **settings: Any) -> AsyncIterator[Any]:
    """A session and the client of its engine; no task and no connection is left afterwards."""
    before = asyncio.all_tasks()
    client = ScriptedClient(scripts)
    provider = ScriptedProvider(client, TEXT)
    given = {"tool_server": (f"{LABEL}={url}",), "tool_call_parser": "hermes", **settings}
    servers = make_tool_servers(ServerConfig(**given))
    async with http(make_app(provider=provider, tool_servers=servers, **given)) as session:
        yield session, client
        await servers.close()
    assert not client.has_unfinished()
    provider.engine.shutdown()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


async def post(session: httpx.AsyncClient, status: int = 200, **body: Any) -> Any:
    answer = await session.post(URL, json={"input": "Add", "tools": [MCP], **body})
    assert answer.status_code == status, answer.text
    return parse_stream(answer.text) if body.get("stream") and status == 200 else answer.json()


async def test_calls_run_inside_the_response(url: str) -> None:
    async with serving([f"Let me see.{ADD}", "It is 3."], url) as (session, client):
        answer = await post(session)
    Response.model_validate(answer, strict=True)
    listing, text, called, last = answer["output"]
    assert [tool["name"] for tool in listing["tools"]] == ["add", "fail", "hang", "long", "die"]
    assert text["content"][0]["text"] == "Let me see."
    assert called["type"] == "mcp_call"
    assert (called["server_label"], called["name"], called["status"]) == (LABEL, "add", "completed")
    assert json.loads(called["arguments"]) == {"a": 1, "b": 2}
    assert called["output"] == "1 and 2 make 3"
    assert last["content"][0]["text"] == "It is 3."
    first, second = client.prompts
    assert "loop__add" in first
    assert second.startswith(f'{first}Let me see. CALL loop__add {{"a": 1, "b": 2}}')
    assert "1 and 2 make 3" in second
    usage = answer["usage"]
    assert usage["input_tokens"] == sum(len(request.token_ids) for request in client.added)
    assert usage["output_tokens"] == len(f"Let me see.{ADD}It is 3.") + 2


async def test_the_order_of_a_stream(url: str) -> None:
    async with serving([ADD, "Three"] * 2, url) as (session, _):
        events = await post(session, stream=True)
        whole = await post(session)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert comparable(events[-1]["response"]) == comparable(whole)


async def test_several_calls_of_a_turn_and_a_second_round(url: str) -> None:
    second = call("loop__add", a=5, b=5)
    async with serving([ADD + call("loop__fail"), second, "Done"], url) as (session, client):
        answer = await post(session)
    calls = [item for item in answer["output"] if item["type"] == "mcp_call"]
    assert [item["status"] for item in calls] == ["completed", "failed", "completed"]
    assert "it is raining" in calls[1]["error"]["content"][0]["text"]
    assert "it is raining" in client.prompts[1]
    assert "5 and 5 make 10" in client.prompts[2]


async def test_a_call_of_the_clients_function_ends_the_response_after_the_others_ran(url: str) -> None:
    async with serving([ADD + call("weather", city="Rome"), "Sunny"], url) as (session, client):
        answer = await post(session, tools=[MCP, WEATHER])
        assert answer["status"] == "completed"
        assert [item["type"] for item in answer["output"]] == ["mcp_list_tools", "mcp_call", "function_call"]
        assert answer["output"][1]["output"] == "1 and 2 make 3"
        result = {"type": "function_call_output", "call_id": answer["output"][2]["call_id"], "output": "sun"}
        again = await post(session, input=[result], previous_response_id=answer["id"], tools=[MCP, WEATHER])
        assert again["output"][-1]["content"][0]["text"] == "Sunny"
    for part in ("1 and 2 make 3", "CALL weather", "sun"):
        assert part in client.prompts[1]


async def test_max_tool_calls(url: str) -> None:
    async with serving([ADD + ADD, "Enough"], url) as (session, client):
        answer = await post(session, max_tool_calls=1)
    assert [item.get("status") for item in answer["output"][1:]] == ["completed", "failed", "completed"]
    assert "max_tool_calls" in answer["output"][2]["error"]["message"]
    assert "TOOLS" not in client.prompts[-1]  # the model is offered none any more


async def test_a_model_that_never_stops_calling_is_stopped(url: str) -> None:
    async with serving(ADD, url, max_tool_turns=3) as (session, client):
        answer = await post(session)
    assert answer["status"] == "completed"
    assert len(client.added) == 4
    assert "TOOLS" in client.prompts[2]
    assert "TOOLS" not in client.prompts[3]


async def test_max_output_tokens_is_for_all_turns_together(url: str) -> None:
    async with serving([ADD, "x" * 500], url) as (session, _):
        answer = await post(session, max_output_tokens=100)
        assert answer["status"] == "incomplete"
        assert answer["usage"]["output_tokens"] == 100
    async with serving([ADD, "Never said"], url) as (session, client):
        answer = await post(session, max_output_tokens=len(ADD) - 20)
        assert answer["output"][1]["status"] == "failed"
        assert len(client.added) == 1
        assert (await post(session, previous_response_id=answer["id"]))["status"] == "completed"


async def test_a_forced_call_is_forced_once(url: str) -> None:
    async with serving([ADD, "Three"], url) as (session, client):
        answer = await post(session, tool_choice={"type": "mcp", "server_label": LABEL, "name": "add"})
    assert answer["status"] == "completed"
    assert [request.grammar is not None for request in client.added] == [True, False]


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"server_label": "other"}, "tools[0].server_label"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "tools[0].server_url"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id"),
        ({"authorization": "x"}, "tools[0].authorization"),
        ({"require_approval": "always"}, "tools[0].require_approval"),
        ({"allowed_tools": ["add", "multiply"]}, "tools[0].allowed_tools"),
        ({"allowed_tools": "add"}, "tools[0].allowed_tools"),
    ],
)
async def test_what_is_refused(tool: dict[str, Any], field: str, url: str) -> None:
    async with serving("x", url) as (session, client):
        answer = await post(session, 400, tools=[MCP | tool])
        assert answer["error"]["param"] == field
        twice = await post(session, 400, tools=[MCP, MCP])
        assert twice["error"]["param"] == "tools[1]"
        assert client.added == []


async def test_what_is_optional_and_not_there_is_left_out(url: str) -> None:
    async with serving("x", url) as (session, _):
        answer = await post(session, tools=[{"type": "mcp", "server_label": "other", "optional": True}])
    assert [item["type"] for item in answer["output"]] == ["message"]


async def test_a_client_may_keep_the_conversation_itself(url: str) -> None:
    async with serving([ADD + call("loop__fail"), "Three", "Still three"], url) as (session, client):
        first = await post(session, store=False)
        items = [{"role": "user", "content": "Add"}, *first["output"], {"role": "user", "content": "Sure?"}]
        assert (await post(session, input=items, store=False))["status"] == "completed"
    for part in ('CALL loop__add {"a": 1, "b": 2}', "1 and 2 make 3", "it is raining", "Three", "Sure?"):
        assert part in client.prompts[-1]


async def test_only_allowed_tools_are_offered(url: str) -> None:
    async with serving("x", url) as (session, client):
        answer = await post(session, tools=[MCP | {"allowed_tools": {"tool_names": ["fail"]}}])
        assert [tool["name"] for tool in answer["output"][0]["tools"]] == ["fail"]
        await post(session, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [MCP | {"name": "add"}]})
        refused = await post(session, 400, tool_choice={"type": "mcp", "server_label": "other"})
    assert refused["error"]["param"] == "tool_choice"
    assert "loop__add" not in client.prompts[0]
    assert "loop__add" in client.prompts[1]
    assert "loop__fail" not in client.prompts[1]


async def test_a_dead_server_is_a_clear_error_before_anything_runs() -> None:
    async with serving("x", "http://127.0.0.1:9/mcp") as (session, client):
        for stream in (False, True):
            answer = await post(session, 502, stream=stream)
            assert LABEL in answer["error"]["message"]
    assert client.added == []


async def test_a_slow_call_fails_and_the_model_hears_of_it(url: str) -> None:
    async with serving([call("loop__hang"), "Too slow"], url, tool_call_timeout=0.5) as (session, client):
        answer = await post(session)
    assert answer["output"][1]["status"] == "failed"
    assert "within 0.5 s" in answer["output"][1]["error"]["message"]
    assert "within 0.5 s" in client.prompts[1]


async def test_a_cancelled_response_leaves_its_call(url: str) -> None:
    async with serving([call("loop__hang"), "Never"], url) as (session, client):
        queued = await post(session, background=True)
        async with asyncio.timeout(20):
            while client.num_steps < len(call("loop__hang")):
                await asyncio.sleep(0)
        cancelled = await session.post(f"{URL}/{queued['id']}/cancel", json={})
        assert cancelled.json()["status"] == "cancelled"
        again = await post(session, previous_response_id=queued["id"])
        assert again["status"] == "completed"
