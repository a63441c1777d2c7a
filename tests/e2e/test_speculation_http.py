"""Answers that stop inside of accepted drafts: text, usage and finish reason of no speculation, on every API.

Each answer is predicted as a whole, so that nearly all of its tokens are drafts, and then stopped within.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Running
from tests.metrics.scrape import Scrape

TEXT = "one two three four five six seven eight nine ten eleven twelve " * 3
ASKED = f"Repeat this text: {TEXT}"
MAX_TOKENS = 26
NUMBERS = itertools.count()
ATTEMPTS = 50  # on a busy machine drafts may look too expensive for a while


@dataclass(frozen=True)
class Ending:
    """What has to be the same."""

    text: str
    reason: Any
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Api:
    path: str
    body: dict[str, Any]
    limit: str  # its field for the most tokens
    stop: str  # and the one for stop strings
    read: Callable[[dict[str, Any]], Ending]
    read_stream: Callable[[Iterator[dict[str, Any]]], Ending]


def of_openai(answer: dict[str, Any]) -> Ending:
    (choice,), usage = answer["choices"], answer["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    reason = choice["finish_reason"], choice.get("stop_reason")
    return Ending(text, reason, usage["prompt_tokens"], usage["completion_tokens"])


def of_openai_stream(chunks: Iterator[dict[str, Any]]) -> Ending:
    text, reasons, usage = "", [], {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                reasons.append((choice["finish_reason"], choice.get("stop_reason")))
    (reason,) = reasons
    return Ending(text, reason, usage["prompt_tokens"], usage["completion_tokens"])


def of_responses(answer: dict[str, Any]) -> Ending:
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    reason, usage = (answer["status"], answer["incomplete_details"]), answer["usage"]
    return Ending(text, reason, usage["input_tokens"], usage["output_tokens"])


def of_responses_stream(events: Iterator[dict[str, Any]]) -> Ending:
    text, last = "", {}
    for event in events:
        text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        last = event
    ending = of_responses(last["response"])
    assert ending.text == text
    return ending


def of_messages(answer: dict[str, Any]) -> Ending:
    text = "".join(block["text"] for block in answer["content"])
    reason, usage = (answer["stop_reason"], answer["stop_sequence"]), answer["usage"]
    return Ending(text, reason, usage["input_tokens"], usage["output_tokens"])


def of_messages_stream(events: Iterator[dict[str, Any]]) -> Ending:
    text, prompt_tokens, ended = "", 0, {}
    for event in events:
        if event["type"] == "message_start":
            prompt_tokens = event["message"]["usage"]["input_tokens"]
        elif event["type"] == "content_block_delta":
            text += event["delta"]["text"]
        elif event["type"] == "message_delta":
            ended = event
    reason = ended["delta"]["stop_reason"], ended["delta"]["stop_sequence"]
    return Ending(text, reason, prompt_tokens, ended["usage"]["output_tokens"])


TALK = {"messages": [{"role": "user", "content": ASKED}]}
COUNTED = {"stream_options": {"include_usage": True}}
APIS = {
    "completions": Api(
        "/v1/completions", {"prompt": TEXT.strip(), **COUNTED}, "max_tokens", "stop", of_openai, of_openai_stream
    ),
    "chat": Api("/v1/chat/completions", {**TALK, **COUNTED}, "max_tokens", "stop", of_openai, of_openai_stream),
    "responses": Api(
        "/v1/responses", {"input": ASKED}, "max_output_tokens", "stop", of_responses, of_responses_stream
    ),
    "messages": Api("/v1/messages", TALK, "max_tokens", "stop_sequences", of_messages, of_messages_stream),
}


@pytest.fixture
def client(default_server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=default_server.url, timeout=120) as made:
        yield made


def accepted(client: httpx.Client) -> float:
    return Scrape(client.get("/metrics").text).get("spec_decode_num_accepted_tokens_total")


def ask(client: httpx.Client, api: Api, *, stream: bool = False, **fields: Any) -> Ending:
    body = {**api.body, "model": "smollm2", "temperature": 0, api.limit: MAX_TOKENS, **fields}
    body["cache_salt"] = f"stops {next(NUMBERS)}"  # no prefix hits, which Messages do not count as input
    if not stream:
        body.pop("stream_options", None)
        found = client.post(api.path, json=body)
        assert found.status_code == 200, found.text
        return api.read(found.json())
    with client.stream("POST", api.path, json={**body, "stream": True}) as response:
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
        return api.read_stream(map(json.loads, data))


@pytest.mark.parametrize("name", APIS)
def test_stops_within_drafts(client: httpx.Client, name: str) -> None:
    api = APIS[name]
    plain = ask(client, api, speculate=False)
    assert plain.output_tokens == MAX_TOKENS, "it goes on"
    predicted = {"prediction": {"type": "content", "content": plain.text}}
    stop_word = max(plain.text.split(), key=plain.text.index)  # the one that comes latest
    given = {"model": "smollm2", "prompt": f" {stop_word}", "add_special_tokens": False}
    token = client.post("/tokenize", json=given).json()["tokens"][-1]
    stops: list[dict[str, Any]] = [{api.stop: [stop_word]}, {"stop_token_ids": [token]}, {api.limit: 17}, {}]
    expected = [ask(client, api, speculate=False, **fields) for fields in stops]
    assert [ending.output_tokens < MAX_TOKENS for ending in expected] == [True, True, True, False], "it stops within"
    before = accepted(client)
    for _ in range(ATTEMPTS):
        for fields, ending in zip(stops, expected, strict=True):
            assert ask(client, api, **predicted, **fields) == ending, fields
            assert ask(client, api, stream=True, **predicted, **fields) == ending, fields
        if accepted(client) - before > 24:
            return
    pytest.fail("answers are mostly accepted drafts")


@pytest.mark.parametrize("name", ["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_of_predicted_tokens(client: httpx.Client, name: str, stream: bool) -> None:
    api, found = APIS[name], []

    def details(stop: str | None = None, prediction: str | None = None) -> tuple[int, dict[str, int]]:
        body = {**api.body, "model": "smollm2", "temperature": 0, api.limit: MAX_TOKENS, "stop": stop}
        if prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        if not stream:
            body.pop("stream_options")
            answer = client.post(api.path, json=body).json()
            found.append(api.read(answer).text)
            usage = answer["usage"]
        else:
            with client.stream("POST", api.path, json={**body, "stream": True}) as response:
                lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
            found.append(api.read_stream(map(json.loads, lines)).text)
            usage = json.loads(lines[-1])["usage"]
        return usage["completion_tokens"], usage["completion_tokens_details"]

    assert details()[1] == {"reasoning_tokens": 0}
    text = found[0]
    for stop in (None, max(text.split(), key=text.index)):
        for _ in range(ATTEMPTS):
            num_tokens, counts = details(stop, text)
            assert counts.keys() == {"reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
            assert 0 <= counts["accepted_prediction_tokens"] < num_tokens
            if counts["accepted_prediction_tokens"]:
                break
        else:
            pytest.fail("no draft was ever accepted")
    assert found[1] == text
