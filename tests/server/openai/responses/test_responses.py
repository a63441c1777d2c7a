"""POST /v1/responses with OpenAI's own client over loopback, and with plain HTTP where shapes and order matter."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.frontend.fake_client import TOKENIZER, FakeClient
from tests.server.helpers import MODEL, LiveServer, http, live_server, long_client, serving
from tests.server.scripted import ScriptedClient, scripted_app

URL = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THINKING = {"reasoning_parser": "deepseek_r1"}
PARSERS = THINKING | {"tool_call_parser": "hermes"}
ANSWERS = st.lists(
    st.sampled_from(["Hello ", "<think>", "</think>", CALL, "\n", "wörld", "<tool_", '{"a": [1, "</tool_call>"]}']),
    max_size=8,
)


async def ask(client: FakeClient, _status: int = 200, _settings: dict[str, Any] | None = None, **body: Any) -> Any:
    async with serving(client, **(_settings or {})) as session:
        response = await session.post(URL, json={"input": "Hello", **body})
    assert response.status_code == _status, response.text
    return parse_stream(response.text) if body.get("stream") and _status == 200 else response.json()


def parse_stream(text: str) -> list[dict[str, Any]]:
    """The events, numbered from 0, each under its own name and valid for OpenAI's client."""
    events = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        assert EVENT.validate_python(event, strict=True).type == event["type"]
        events.append(event)
    return events


def prompt_of(client: FakeClient) -> str:
    return TOKENIZER.decode(client.added[-1].token_ids, skip_special_tokens=False)


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "ID")
    plain: dict[str, Any] = json.loads(text)
    for name in ("created_at", "completed_at"):
        del plain[name]
    for item in plain["output"]:
        item.pop("call_id", None)
    return plain


async def test_the_shape_of_a_response() -> None:
    answer = await ask(FakeClient("Hi there"), model=MODEL, metadata={"a": "b"})
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["metadata"] == {"a": "b"}
    (message,) = answer["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hi there", "annotations": [], "logprobs": []}]
    assert answer["usage"]["output_tokens"] == 9
    Response.model_validate(answer, strict=True)


async def test_the_order_of_a_stream() -> None:
    events = await ask(long_client(f"<think>Hm</think>Well{CALL}"), stream=True, tools=[WEATHER], _settings=THINKING)
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_repeats = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert without_repeats == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["output"] == []


async def test_thinking_as_a_summary() -> None:
    events = await ask(
        FakeClient("<think>Hm</think>Yes"), stream=True, reasoning={"summary": "auto"}, _settings=THINKING
    )
    kinds = {event["type"] for event in events}
    assert {"response.reasoning_summary_part.added", "response.reasoning_summary_text.delta"} <= kinds
    assert events[-1]["response"]["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm"}]


@given(ANSWERS, st.integers(1, 7))
@settings(max_examples=12, deadline=None)
async def test_a_stream_adds_up_to_the_response(parts: list[str], chunk: int) -> None:
    """Over HTTP; test_events.py has the builder alone, for many more answers."""
    app, provider = scripted_app(**PARSERS)
    answers = []
    for stream in (False, True):
        provider.use(ScriptedClient("".join(parts), chunk=chunk))
        async with http(app) as session:
            response = await session.post(URL, json={"input": "Hello", "tools": [WEATHER], "stream": stream})
        answers.append(parse_stream(response.text) if stream else response.json())
    whole, events = answers
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert comparable(events[-1]["response"]) == comparable(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


async def test_a_namespace_is_flattened_for_the_model_and_mapped_back() -> None:
    space = {"type": "namespace", "name": "meteo", "description": "d", "tools": [WEATHER]}
    client = long_client(CALL.replace("weather", "meteo__weather"))
    answer = await ask(client, tools=[space])
    (call,) = answer["output"]
    assert (call["namespace"], call["name"]) == ("meteo", "weather")
    assert "meteo__weather" in prompt_of(client)
    Response.model_validate(answer)


async def test_a_conversation_goes_on_from_a_stored_response() -> None:
    client = long_client(f"Let me see.{CALL}")
    async with serving(client) as session:
        first = (
            await session.post(URL, json={"input": "Rain?", "tools": [WEATHER], "instructions": "Be kind"})
        ).json()
        call_id = first["output"][1]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        body = {"input": [output], "previous_response_id": first["id"], "tools": [WEATHER]}
        second = (await session.post(URL, json=body)).json()
        prompt = prompt_of(client)
        for part in ("[user]Rain?", "Let me see.", "sunny"):
            assert part in prompt
        assert "Be kind" not in prompt
        listed = (await session.get(f"{URL}/{second['id']}/input_items?order=asc&limit=2")).json()
        assert [item["type"] for item in listed["data"]] == ["message", "message"]
        assert listed["has_more"]
        rest = await session.get(f"{URL}/{second['id']}/input_items?order=asc&after={listed['last_id']}")
        assert [item["type"] for item in rest.json()["data"]] == ["function_call", "function_call_output"]
        assert (await session.get(f"{URL}/{first['id']}")).json() == first
        assert (await session.delete(f"{URL}/{first['id']}")).json()["deleted"] is True
        assert (await session.get(f"{URL}/{first['id']}")).status_code == 404
        again = await session.post(URL, json={"input": "x", "previous_response_id": first["id"]})
        assert again.status_code == 404
        assert again.json()["error"]["param"] == "previous_response_id"


async def test_store_false_keeps_nothing_and_the_client_hands_items_back() -> None:
    client = long_client("<think>deep</think>Yes")
    async with serving(client, **THINKING) as session:
        body = {"input": "Q", "store": False, "include": ["reasoning.encrypted_content"]}
        first = (await session.post(URL, json=body)).json()
        assert (await session.get(f"{URL}/{first['id']}")).status_code == 404
        thought = first["output"][0]
        assert thought["encrypted_content"]
        items = [{"role": "user", "content": "Q"}, *first["output"], {"role": "user", "content": "Sure?"}]
        answer = await session.post(URL, json={"input": items, "store": False})
        assert answer.status_code == 200
    assert "Sure?" in prompt_of(client)


async def test_the_store_is_bounded() -> None:
    async with serving(FakeClient("x"), max_stored_responses=2) as session:
        ids = [(await session.post(URL, json={"input": str(i)})).json()["id"] for i in range(3)]
        found = [(await session.get(f"{URL}/{response_id}")).status_code for response_id in ids]
    assert found == [404, 200, 200]


async def test_truncation_leaves_out_the_oldest() -> None:
    items = [
        {"role": "system", "content": "S"},
        *({"role": "user", "content": f"<{i}>" + "x" * 100} for i in range(9)),
        {"role": "user", "content": "last"},
    ]
    refused = await ask(FakeClient("ok"), _status=400, input=items)
    assert "tokens" in refused["error"]["message"]
    client = FakeClient("ok")
    await ask(client, input=items, truncation="auto", max_output_tokens=16)
    prompt = prompt_of(client)
    assert "[system]S" in prompt
    assert "last" in prompt
    assert "<0>" not in prompt
    assert "<8>" in prompt


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True, "store": False}, "store"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"model": "nobody"}, "model"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
async def test_what_is_refused_names_the_field(body: dict[str, Any], field: str) -> None:
    async with serving(FakeClient("x")) as session:
        response = await session.post(URL, json={"input": "Hello", **body})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == field


async def test_optional_hosted_tools_are_left_out() -> None:
    tools = [{"type": "web_search", "external_web_access": False}, {"type": "file_search", "optional": True}]
    assert (await ask(FakeClient("x"), tools=tools))["status"] == "completed"


@pytest.mark.parametrize("chunk", [1, 9, 1000])
async def test_a_response_ends_with_its_first_call_where_there_may_be_no_other(chunk: int) -> None:
    app, provider = scripted_app(tool_call_parser="hermes", reasoning_parser="magistral")
    script = f"[THINK]Hm.[/THINK]Well.\n{CALL}\n{CALL}"
    answers = []
    for stream in (False, True):
        provider.use(client := ScriptedClient(script, chunk=chunk))
        body = {"input": "Hello", "tools": [WEATHER], "parallel_tool_calls": False, "stream": stream}
        async with http(app) as session:
            response = await session.post(URL, json=body)
        answers.append(parse_stream(response.text)[-1]["response"] if stream else response.json())
        assert len(client.aborted) == (chunk < 1000)  # or it has said everything already
    assert comparable(answers[0]) == comparable(answers[1])
    assert [item["type"] for item in answers[0]["output"]] == ["reasoning", "message", "function_call"]
    assert answers[0]["status"] == "completed"
    usage = answers[0]["usage"]
    # The two marks of thinking are one token each.
    assert usage["output_tokens"] == 2 + len(f"Hm.Well.\n{CALL}".encode())
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}


async def test_running_out_of_tokens_is_incomplete() -> None:
    answer = await ask(FakeClient("Hello"), max_output_tokens=2)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


async def test_an_error_in_the_middle_fails_the_response() -> None:
    events = await ask(FakeClient("Hello", dies_at_step=2), stream=True)
    assert events[-1]["type"] == "response.failed"
    assert "died" in events[-1]["response"]["error"]["message"]


class City(BaseModel):
    city: str


def sdk(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openais_client_creates_streams_parses_and_cancels() -> None:
    with live_server(long_client('{"city": "Rome"}')) as server, sdk(server) as client:
        created = client.responses.create(
            model=MODEL, input="Where?", top_logprobs=2, include=["message.output_text.logprobs"]
        )
        assert created.output_text == '{"city": "Rome"}'
        parsed = client.responses.parse(model=MODEL, input="Where?", text_format=City)
        assert parsed.output_parsed == City(city="Rome")
        assert server.client.added[-1].grammar is not None
        with client.responses.stream(model=MODEL, input="Where?") as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text
        queued = client.responses.create(model=MODEL, input="Where?", background=True)
        assert queued.status == "queued"
        server.wait_until(lambda: True)
        while client.responses.retrieve(queued.id).status != "completed":
            server.wait_until(lambda: True)
        assert client.responses.cancel(queued.id).status == "completed"
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(created.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_unknown")


def test_a_background_response_can_be_cancelled() -> None:
    with live_server(long_client("x" * 500_000)) as server, sdk(server) as client:
        queued = client.responses.create(model=MODEL, input="Long", background=True)
        server.wait_until(lambda: bool(server.client.added))
        assert client.responses.cancel(queued.id).status == "cancelled"
        server.wait_until(lambda: not server.client.has_unfinished())
        assert client.responses.retrieve(queued.id).status == "cancelled"
