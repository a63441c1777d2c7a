"""`logprob_token_ids` in each API that tells log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
ASKED = [ord("Z"), ord("Q")]


def top_of(entry: dict[str, Any]) -> list[tuple[str, float]]:
    return [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]


@pytest.mark.parametrize("top", [None, 1])
async def test_chat_shows_them_besides_the_top_ones(top: int | None) -> None:
    async with serving(FakeClient("x")) as session:
        fields = {} if top is None else {"logprobs": True, "top_logprobs": top}
        answer = (
            await session.post("/v1/chat/completions", json={**CHAT, **fields, "logprob_token_ids": ASKED})
        ).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    likeliest = [] if top is None else [("y", -1.0)]
    assert top_of(entry) == [*likeliest, ("Q", -81.0), ("Z", -90.0)]
    assert (entry["token"], entry["logprob"]) == ("x", -2.0)


async def test_completions_and_responses_show_them() -> None:
    async with serving(FakeClient("x")) as session:
        completion = await session.post(
            "/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "logprob_token_ids": ASKED}
        )
        response = await session.post(
            "/v1/responses", json={"input": "Hi", "max_output_tokens": 1, "logprob_token_ids": ASKED}
        )
    (top,) = completion.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"x": -2.0, "Z": -90.0, "Q": -81.0}
    (entry,) = response.json()["output"][0]["content"][0]["logprobs"]
    assert top_of(entry) == [("Q", -81.0), ("Z", -90.0)]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
@pytest.mark.parametrize("ids", [[258], [-1], ["a"], list(range(21)), [1] * 5000])
async def test_ids_that_cannot_be_answered_are_refused(url: str, body: dict[str, Any], ids: list[Any]) -> None:
    async with serving(FakeClient("x")) as session:
        refused = await session.post(url, json={**body, "logprob_token_ids": ids})
        empty = await session.post(url, json={**body, "logprob_token_ids": []})
    assert refused.status_code == 400, refused.text
    assert "logprob_token_ids" in refused.text
    assert empty.status_code == 200
