"""Tools and structured output as a user meets them: `quire serve` with the default model, and the openai client."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.serving import Running

ROOT = Path(__file__).parents[2]
QUESTION: Any = [{"role": "user", "content": "Plan a trip to Paris for two."}]
TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "guests": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
                    "child": {"type": "boolean"},
                },
                "required": ["name", "child"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
        "class": {"enum": ["first", "second", None]},
    },
    "required": ["city", "days", "guests", "class"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "sea": {"type": "boolean"}, "size": {"enum": [1, 2]}},
    "required": ["city", "sea", "size"],
    "additionalProperties": False,
}
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any], strict: bool = False) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


SCHEMAS = {"book_trip": TRIP, "find_place": PLACE, "count": COUNT}


@pytest.fixture
def server(default_server: Running) -> Running:
    return default_server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as session:
        yield session


def check_calls(choice: Any) -> int:
    """Every call that is complete obeys its schema; how many there are."""
    calls = choice.message.tool_calls or []
    if choice.finish_reason == "length":
        calls = calls[:-1]
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return len(calls)


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ("required", ("find_place", "count")),
        ({"type": "function", "function": {"name": "book_trip"}}, ("book_trip", "count")),
    ],
)
def test_forced_calls_obey_their_schemas_however_hot_the_model(
    client: openai.OpenAI, choice: Any, offered: tuple[str, ...]
) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        tools=[tool(name, SCHEMAS[name]) for name in offered],
        tool_choice=choice,
        temperature=1.5,
        seed=7,
        n=3,
        max_tokens=100,
    )
    assert sum(check_calls(one) for one in answer.choices) >= 1
    names = set(offered) if choice == "required" else {"book_trip"}
    for one in answer.choices:
        assert {call.function.name for call in one.message.tool_calls or ()} <= names
        assert one.finish_reason in ("tool_calls", "length")
        assert one.finish_reason == "length" or one.message.content is None


def test_strict_calls_obey_their_schemas_when_the_model_is_free_to_call(client: openai.OpenAI) -> None:
    # A model this small calls nothing by itself: it does as it seems to have done before.
    messages: list[Any] = []
    for number in (3, 12, 7, 8):
        call = {"name": "count", "arguments": json.dumps({"n": number})}
        made = {"id": f"call_{number}", "type": "function", "function": call}
        messages.append({"role": "user", "content": f"Count {number} figs."})
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[*messages, {"role": "user", "content": "Count 5 figs."}],
        tools=[tool("count", COUNT, strict=True)],
        temperature=1.5,
        seed=1,
        n=4,
        max_tokens=30,
    )
    assert sum(check_calls(one) for one in answer.choices) >= 1


def test_json_schema_is_obeyed_streamed_or_not(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "smollm2",
        "messages": QUESTION,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}},
        "temperature": 1.5,
        "seed": 5,
        "n": 2,
        "max_tokens": 150,
    }
    answer = client.chat.completions.create(**fields)
    finished = [one for one in answer.choices if one.finish_reason == "stop"]
    assert finished
    for one in finished:
        jsonschema.validate(json.loads(one.message.content or ""), PLACE)
    texts = [""] * 2
    for chunk in client.chat.completions.create(**fields, stream=True):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
    assert texts == [one.message.content for one in answer.choices]


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern="^[A-Z][a-z]{1,6}$")
    legs: int = Field(ge=0, le=8)


def test_the_clients_own_classes(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=Pet, temperature=1.5, seed=1, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    called = client.chat.completions.parse(
        model="smollm2",
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Pet, name="adopt")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.5,
        seed=1,
        max_tokens=100,
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Pet)
    with client.chat.completions.stream(
        model="smollm2",
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Pet, name="adopt")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.5,
        seed=1,
        max_tokens=100,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments


def test_completions_take_structured_outputs(client: openai.OpenAI) -> None:
    for wanted, pattern in (
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"choice": ["heads", "tails"]}, "heads|tails"),
        ({"grammar": 'start: "x"~2..4 "!"'}, "x{2,4}!"),
    ):
        answer = client.completions.create(
            model="smollm2",
            prompt="Say",
            temperature=1.5,
            seed=2,
            max_tokens=20,
            extra_body={"structured_outputs": wanted},
        )
        assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text
    answer = client.completions.create(
        model="smollm2",
        prompt="Say",
        max_tokens=60,
        extra_body={"response_format": {"type": "json_object"}, "seed": 4},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].text), dict)


def test_the_examples_of_the_guide(server: Running) -> None:
    page = (ROOT / "docs" / "guides" / "tool-calling.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(blocks) >= 4
    source = "\n".join(blocks).replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tool_calls get_weather {'city': ")
    assert "tool_calls" in lines[1:]
    assert any(re.fullmatch(r"city='\w+' rain=(True|False)", line) for line in lines)
    assert lines[-1] in ("yes", "no")


def test_schemas_that_take_long_delay_no_other_stream(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    latency = importlib.import_module("structured_latency")
    gaps = {}
    for kind, make in latency.KINDS.items():
        gaps[kind], statuses = asyncio.run(latency.worst_gap(server.url, make, 1, seed=1))
        assert statuses <= {200, 400}, (kind, statuses)
    # The benchmark has the real limit, 50 ms; a shared machine may stall anything for longer. A loop that checked or
    # compiled these itself would stall for seconds.
    assert max(gaps.values()) - gaps["trivial"] < 1000, gaps
