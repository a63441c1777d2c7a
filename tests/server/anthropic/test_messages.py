"""POST /v1/messages with Anthropic's own client over loopback, and with plain HTTP where shapes matter."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from quire.server.anthropic.events import usage_of
from quire.server.generation.usage import UsageCounter
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.request import EngineRequest
from tests.frontend.fake_client import TOKENIZER, FakeClient
from tests.server.helpers import LONG, MODEL, LiveServer, http, live_server, long_client, serving
from tests.server.openai.responses.test_responses import ANSWERS, PARSERS
from tests.server.scripted import ScriptedClient, scripted_app

URL = "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
EVENT = TypeAdapter(RawMessageStreamEvent)


async def ask(client: FakeClient, _status: int = 200, _settings: dict[str, Any] | None = None, **body: Any) -> Any:
    async with serving(client, **(_settings or {})) as session:
        response = await session.post(URL, json={"messages": HELLO, "max_tokens": 200, **body})
    assert response.status_code == _status, response.text
    return parse_stream(response.text) if body.get("stream") and _status == 200 else response.json()


def parse_stream(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name, all but pings valid for Anthropic's client."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def prompt_of(client: FakeClient) -> str:
    request: EngineRequest = client.added[-1]
    return TOKENIZER.decode(request.token_ids, skip_special_tokens=False)


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, as a client folds it."""
    message: dict[str, Any] = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] += delta[name]
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return message


async def test_the_shape_of_a_message() -> None:
    answer = await ask(FakeClient("Hi there"), model=MODEL)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hi there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("[user]Hello\n[assistant]"),
            "output_tokens": 9,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }
    Message.model_validate(answer | {"id": "msg_1"}, strict=True)


async def test_the_order_of_a_stream() -> None:
    events = await ask(FakeClient("Hi"), stream=True)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["output_tokens"] == 0


@given(ANSWERS, st.integers(1, 7))
@settings(max_examples=12, deadline=None)
async def test_a_stream_adds_up_to_the_message(parts: list[str], chunk: int) -> None:
    """Over HTTP; test_events.py has the builder alone, for many more answers."""
    app, provider = scripted_app(**PARSERS)
    answers = []
    for stream in (False, True):
        provider.use(ScriptedClient("".join(parts), chunk=chunk))
        body = {"messages": HELLO, "max_tokens": 400, "tools": [WEATHER], "stream": stream}
        async with http(app) as session:
            response = await session.post(URL, json=body)
        answers.append(folded(parse_stream(response.text)) if stream else response.json())
    for message in answers:
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert answers[0] == answers[1]


async def test_calls_and_the_text_beside_them() -> None:
    answer = await ask(long_client(f"Let me see.{CALL}"), tools=[WEATHER])
    text, call = answer["content"]
    assert text["text"] == "Let me see."
    assert call["type"] == "tool_use"
    assert call["name"] == "weather"
    assert call["input"] == {"city": "Köln"}
    assert call["id"]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("chunk", [1, 9, 1000])
async def test_a_message_ends_with_its_first_call_where_there_may_be_no_other(chunk: int) -> None:
    app, provider = scripted_app(**PARSERS)
    answers = []
    for stream in (False, True):
        provider.use(client := ScriptedClient(f"Well.\n{CALL}\n{CALL}", chunk=chunk))
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        body = {"messages": HELLO, "max_tokens": 400, "tools": [WEATHER], "tool_choice": choice, "stream": stream}
        async with http(app) as session:
            response = await session.post(URL, json=body)
        answers.append(folded(parse_stream(response.text)) if stream else response.json())
        assert len(client.aborted) == (chunk < 1000)  # or it has said everything already
    for message in answers:
        message.pop("id")
        assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
        assert message["content"][1].pop("id")
        assert message["stop_reason"] == "tool_use"
        assert message["usage"]["output_tokens"] == len(f"Well.\n{CALL}".encode())
    assert answers[0] == answers[1]


async def test_a_call_that_was_cut_short_keeps_what_is_there() -> None:
    answer = await ask(long_client(CALL), tools=[WEATHER], max_tokens=60)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["type"] == "tool_use"


async def test_thinking_is_a_block_of_its_own() -> None:
    settings_ = {"reasoning_parser": "deepseek_r1"}
    script = "<think>Hm.</think>Yes."
    answer = await ask(FakeClient(script), _settings=settings_)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][0]["thinking"] == "Hm."
    assert answer["content"][0]["signature"]
    hidden = await ask(FakeClient(script), _settings=settings_, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"][0]["thinking"] == ""


async def test_a_conversation_with_every_kind_of_block_reaches_the_template() -> None:
    client = long_client("ok")
    await ask(
        client,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I should look.", "signature": "quire"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
    )
    prompt = prompt_of(client)
    for part in ("[system]Be brief.", "[user]Rain?", "Looking.", '"city":"Rome"', "sunny", "So?"):
        assert part in prompt, (part, prompt)
    assert prompt.endswith("[assistant]")


async def test_what_the_model_thought_and_whether_a_tool_failed_reach_the_template() -> None:
    app, provider = scripted_app(**PARSERS)
    provider.use(client := ScriptedClient("ok"))
    said = [
        {"type": "thinking", "thinking": "I should look.", "signature": "quire"},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "no such city", "is_error": True}
    messages = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    async with http(app) as session:
        answer = await session.post(URL, json={"messages": messages, "max_tokens": 9, "tools": [WEATHER]})
        counted = await session.post(f"{URL}/count_tokens", json={"messages": messages, "tools": [WEATHER]})
    assert answer.json()["usage"]["input_tokens"] == counted.json()["input_tokens"]
    (prompt,) = client.prompts
    assert 'THOUGHT I should look. CALL weather {"city": "Rome"}' in prompt
    assert "[tool]Error: no such city FOR t1" in prompt


def test_tokens_from_the_cache_are_counted_apart() -> None:
    counter = UsageCounter()
    completion = CompletionOutput(0, "ab", [1, 2])
    counter.add(RequestOutput("r", None, [0] * 10, [completion], True, num_cached_tokens=4))
    usage = usage_of(counter)
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 2)


@pytest.mark.parametrize("where", ["messages", "tool_result"])
async def test_images_are_refused_by_name(where: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    block = image if where == "messages" else {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    answer = await ask(FakeClient("x"), _status=400, messages=[{"role": "user", "content": [block]}])
    assert "'image'" in answer["error"]["message"]


async def test_a_message_of_the_assistant_at_the_end_is_continued() -> None:
    client = FakeClient("B)")
    await ask(client, messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(client).endswith("[assistant]The answer is (")


@pytest.mark.parametrize(
    ("script", "body", "reason", "sequence"),
    [
        ("one two", {"stop_sequences": [" tw"]}, "stop_sequence", " tw"),
        ("one two", {"max_tokens": 3}, "max_tokens", None),
        ("x" * 600, {"max_tokens": 100_000}, "model_context_window_exceeded", None),
        ("one", {}, "end_turn", None),
    ],
)
async def test_why_a_message_ended(script: str, body: dict[str, Any], reason: str, sequence: str | None) -> None:
    answer = await ask(FakeClient(script), **body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"thinking": {"type": "sometimes"}}, "sometimes"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "x"}]}, "mcp_servers"),
    ],
)
async def test_what_is_refused_says_why(body: dict[str, Any], named: str) -> None:
    answer = await ask(FakeClient("x"), _status=400, **body)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    assert answer["request_id"]


async def test_what_only_anthropic_knows_is_accepted() -> None:
    extra = {"context_management": {"edits": []}, "metadata": {"user_id": "u"}, "service_tier": "auto", "newest": 1}
    async with serving(FakeClient("ok")) as session:
        response = await session.post(
            f"{URL}?beta=true",
            json={"messages": HELLO, "max_tokens": 9, **extra},
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "never-heard-of-2027-01-01"},
        )
    assert response.status_code == 200


async def test_an_error_in_the_middle_is_an_event() -> None:
    events = await ask(FakeClient("Hello", dies_at_step=2), stream=True)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


class City(BaseModel):
    city: str


def sdk(server: LiveServer, api_key: str = "secret") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=api_key, max_retries=0)


def test_anthropics_client_creates_streams_counts_and_lists() -> None:
    with live_server(long_client(f"Let me see.{CALL}"), api_keys=("secret",)) as server, sdk(server) as client:
        request: Any = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "tools": [WEATHER]}
        created = client.messages.create(**request)
        assert created.stop_reason == "tool_use"
        with client.messages.stream(**request) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "Let me see."
        assert final.content[1].input == {"city": "Köln"}
        assert final.usage.output_tokens == created.usage.output_tokens
        counted: MessageTokensCount = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER])
        assert counted.input_tokens == created.usage.input_tokens
        models = client.models.list()
        assert [model.id for model in models] == [MODEL, "alias/name"]
        assert client.models.retrieve(MODEL).max_input_tokens == LONG
        with sdk(server, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError, match="API key"):
            stranger.messages.create(**request)
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(**{**request, "model": "nobody"})


def test_anthropics_client_parses_into_a_model() -> None:
    with live_server(FakeClient('{"city": "Rome"}')) as server, sdk(server) as client:
        parsed = client.messages.parse(model=MODEL, max_tokens=64, messages=HELLO, output_format=City)
        assert parsed.parsed_output == City(city="Rome")
        assert server.client.added[-1].grammar is not None
