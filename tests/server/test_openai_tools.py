"""The real `openai` client with tools and classes, against a live server with scripted answers behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.helpers import MODEL, LiveServer, live_server
from tests.server.scripted import TEXT, ScriptedClient, ScriptedProvider

QUESTION: Any = [{"role": "user", "content": "What is the weather in Bern?"}]


class GetWeather(BaseModel):
    city: str
    days: int = 1


class Forecast(BaseModel):
    city: str
    rain: bool


CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
TOOL = openai.pydantic_function_tool(GetWeather)


def answer(prompt: str) -> str:
    """Thinks and calls first, then answers with the result that came back."""
    if "[tool]" in prompt:
        return f"In Bern: {prompt.rpartition('[tool]')[2].partition(' FOR ')[0]}."
    if "JSON" in prompt:
        return '{"city": "Bern", "rain": false}'
    return f"<think>\nA tool may know.\n</think>\n\nLet me see.\n{CALL}"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    client = ScriptedClient(answer, chunk=3)
    provider = ScriptedProvider(client, TEXT)
    with live_server(client, provider=provider, tool_call_parser="hermes", reasoning_parser="qwen3") as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as session:
        yield session


def test_a_tool_loop(client: openai.OpenAI) -> None:
    messages = list(QUESTION)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "A tool may know."
    (call,) = message.tool_calls or []
    messages.append(message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "In Bern: rain."
    assert second.choices[0].finish_reason == "stop"


def test_classes_as_tools_and_formats(client: openai.OpenAI) -> None:
    called = client.chat.completions.parse(model=MODEL, messages=QUESTION, tools=[TOOL])
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Bern", days=2)
    asked: Any = [{"role": "user", "content": "Answer in JSON."}]
    parsed = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Forecast)
    assert parsed.choices[0].message.parsed == Forecast(city="Bern", rain=False)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL], n=2) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 4
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather(city="Bern", days=2)
        assert call.function.arguments == '{"city": "Bern", "days": 2}'
    ids = {call.id for choice in final.choices for call in choice.message.tool_calls or ()}
    assert len(ids) == 2


def test_reasoning_in_a_stream(client: openai.OpenAI) -> None:
    thought = said = ""
    for chunk in client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL], stream=True):
        extra = chunk.choices[0].delta.model_extra or {}
        assert extra.get("reasoning") == extra.get("reasoning_content")
        thought += extra.get("reasoning") or ""
        said += chunk.choices[0].delta.content or ""
    assert (thought, said) == ("A tool may know.", "Let me see.")


def test_a_client_that_leaves_in_the_middle_of_a_call_ends_it(client: openai.OpenAI, server: LiveServer) -> None:
    aborted = len(server.client.aborted)
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], stream=True, extra_body={"ignore_eos": True}
    ) as response:
        for line in response.iter_lines():
            if "arguments" in line:
                break
    server.wait_until(lambda: len(server.client.aborted) > aborted)


def test_errors_name_the_tool(client: openai.OpenAI) -> None:
    bad: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": 3}}}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[bad])
    assert wrong.value.param == "tools[0].function.parameters"
    assert "#/properties" in json.dumps(wrong.value.body)
