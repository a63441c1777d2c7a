"""Each API's thinking budget reaches the engine with the marks of the model's thinking."""

from __future__ import annotations

from typing import Any

import pytest

from quire.types.sampling import SamplingParams, ThinkingMarks
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BEGIN, END = tuple(b"<think>"), tuple(b"</think>")


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {**HELLO, "thinking_token_budget": 5}),
        ("/v1/completions", {"prompt": "Hi", "thinking_token_budget": 5}),
        ("/v1/responses", {"input": "Hi", "thinking_token_budget": 5}),
        ("/v1/messages", {**HELLO, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}),
        (
            "/v1/messages",
            {
                **HELLO,
                "max_tokens": 9,
                "thinking": {"type": "enabled", "budget_tokens": 9},
                "thinking_token_budget": 5,
            },
        ),
    ],
)
async def test_every_api_sends_the_budget_with_the_marks(url: str, body: dict[str, Any]) -> None:
    client = FakeClient("x")
    async with serving(client, reasoning_parser="deepseek_r1") as session:
        answer = await session.post(url, json=body)
    assert answer.status_code == 200, answer.text
    params = client.added[0].params
    assert isinstance(params, SamplingParams)
    assert params.thinking_token_budget == 5
    assert params.thinking_marks == ThinkingMarks(BEGIN, END, False)


@pytest.mark.parametrize("prompt", ["Hi<think>\n", list(b"Hi<think>hm")])
async def test_a_prompt_may_end_inside_of_thinking(prompt: Any) -> None:
    client = FakeClient("x")
    async with serving(client, reasoning_parser="deepseek_r1") as session:
        await session.post("/v1/completions", json={"prompt": prompt, "thinking_token_budget": 0})
    params = client.added[0].params
    assert isinstance(params, SamplingParams)
    assert params.thinking_marks == ThinkingMarks(BEGIN, END, True)


async def test_a_budget_that_cannot_be_kept_is_refused_by_name() -> None:
    async with serving(FakeClient("x"), reasoning_parser="harmony") as session:
        refused = await session.post("/v1/chat/completions", json={**HELLO, "thinking_token_budget": 5})
        thinking = {"type": "enabled", "budget_tokens": 5}
        hint = await session.post("/v1/messages", json={**HELLO, "max_tokens": 9, "thinking": thinking})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert hint.status_code == 200, "clients send this to every model"


@pytest.mark.parametrize("budget", [-1, 1 << 40, "many", 1.5])
async def test_what_is_no_budget_is_refused(budget: Any) -> None:
    async with serving(FakeClient("x")) as session:
        refused = await session.post("/v1/chat/completions", json={**HELLO, "thinking_token_budget": budget})
        thinking = {"type": "enabled", "budget_tokens": budget}
        messages = await session.post("/v1/messages", json={**HELLO, "max_tokens": 9, "thinking": thinking})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert messages.status_code == 400
    assert "budget_tokens" in messages.text
