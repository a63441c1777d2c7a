"""Render endpoints tell what the engine would get; /invocations and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.fake_client import BOS, MAX_MODEL_LEN, FakeClient
from tests.server.helpers import MODEL, events_of, serving

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "temperature": 0.5, "max_tokens": 7}),
        ("/v1/completions", {"prompt": "Hi", "temperature": 0.5, "max_tokens": 7}),
        ("/v1/completions", {"prompt": [BOS, 65], "stop": ["x"], "seed": 3}),
        ("/v1/completions", {"prompt": ["one", "two"], "truncate_prompt_tokens": 2}),
    ],
)
async def test_what_is_rendered_is_what_the_engine_gets(path: str, body: dict[str, Any]) -> None:
    client = FakeClient("x")
    async with serving(client) as session:
        answer = (await session.post(f"{path}/render", json=body)).json()
        assert client.added == []
        await session.post(path, json=body)
    rendered = [answer] if isinstance(answer, dict) else answer
    assert [prompt["token_ids"] for prompt in rendered] == [request.token_ids for request in client.added]
    for prompt in rendered:
        assert prompt["model"] == MODEL
        given = {name: value for name, value in body.items() if name not in ("messages", "prompt")}
        assert given.items() <= prompt["sampling_params"].items()
    if path == "/v1/chat/completions":
        assert rendered[0]["prompt"] == "[user]Hi\n[assistant]"


async def test_what_would_be_refused_is_refused() -> None:
    long = [{"role": "user", "content": "x" * MAX_MODEL_LEN}]
    async with serving() as session:
        answer = await session.post("/v1/chat/completions/render", json={"messages": long})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        answer = await session.post("/v1/completions/render", json={"prompt": "x", "n": 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_invocations_tell_requests_apart_by_their_fields() -> None:
    async with serving(FakeClient("answer")) as session:
        chat = await session.post("/invocations", json={"messages": CHAT})
        text = await session.post("/invocations", json={"prompt": "Hi", "max_tokens": 3})
        stream = await session.post("/invocations", json={"messages": CHAT, "stream": True})
        neither = await session.post("/invocations", json={"inputs": "Hi"})
    assert chat.json()["choices"][0]["message"]["content"] == "answer"
    assert text.json()["choices"][0]["text"] == "ans"
    assert events_of(stream.text)[0]["object"] == "chat.completion.chunk"
    assert neither.status_code == 400
    assert "missing" in neither.json()["error"]["message"]


@pytest.mark.parametrize("length", [3, MAX_MODEL_LEN])
async def test_input_tokens_are_counted_whether_they_fit_or_not(length: int) -> None:
    client = FakeClient("x")
    body = {"model": MODEL, "input": "x" * length, "instructions": "Be brief."}
    async with serving(client) as session:
        counted = (await session.post("/v1/responses/input_tokens", json=body)).json()
        answer = await session.post("/v1/responses", json=body)
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == len(f"[system]Be brief.\n[user]{'x' * length}\n[assistant]")
    if answer.status_code == 200:
        assert counted["input_tokens"] == answer.json()["usage"]["input_tokens"]
