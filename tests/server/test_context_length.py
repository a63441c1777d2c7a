"""A prompt that is too long for the model is told in the words that each API's clients look for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.frontend.fake_client import MAX_MODEL_LEN, FakeClient
from tests.server.helpers import MODEL, serving

TEXT = "x" * MAX_MODEL_LEN
CHAT = [{"role": "user", "content": TEXT}]
OPENAI: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "messages", {"messages": CHAT}),
    ("/v1/completions", "prompt", {"prompt": TEXT}),
    ("/v1/completions", "prompt", {"prompt": ["x", TEXT]}),
    ("/v1/completions", "prompt", {"prompt": [1] * MAX_MODEL_LEN}),
    ("/v1/responses", "input", {"input": TEXT}),
    ("/v1/responses", "input", {"input": TEXT, "truncation": "auto"}),
    ("/v1/responses", "input", {"input": [*CHAT, *CHAT], "truncation": "auto"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field", "body"), OPENAI)
async def test_the_openai_code(path: str, field: str, body: dict[str, Any], stream: bool) -> None:
    client = FakeClient("x")
    async with serving(client) as session:
        response = await session.post(path, json={**body, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "context_length_exceeded",
        "invalid_request_error",
        field,
    )
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert not any(len(request.token_ids) >= MAX_MODEL_LEN for request in client.added)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_anthropic_words(stream: bool) -> None:
    async with serving(FakeClient("x")) as session:
        body = {"model": MODEL, "max_tokens": 5, "messages": CHAT, "stream": stream}
        response = await session.post("/v1/messages", json=body)
    num_tokens = len(f"[user]{TEXT}\n[assistant]")
    assert response.status_code == 400
    assert response.json()["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {num_tokens} tokens > {MAX_MODEL_LEN - 1} maximum",
    }


async def test_a_background_response_says_it_too() -> None:
    async with serving(FakeClient("x")) as session:
        begun = (await session.post("/v1/responses", json={"input": TEXT, "background": True})).json()
        async with asyncio.timeout(20):
            while (stored := (await session.get(f"/v1/responses/{begun['id']}")).json())["status"] == "queued":
                await asyncio.sleep(0)
    assert stored["status"] == "failed"
    assert stored["error"]["code"] == "context_length_exceeded"
