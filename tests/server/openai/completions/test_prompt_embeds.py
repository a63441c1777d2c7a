"""Prompts of embeddings over HTTP: a plain array in base64, off unless it is enabled."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.types.request import PromptEmbeds
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)
EMBEDS = {"data": base64.b64encode(ARRAY.tobytes()).decode(), "shape": [3, 4], "dtype": "float32"}


def taking(size: int = 4) -> FakeClient:
    client = FakeClient("Hey")
    client.info = msgspec.structs.replace(client.info, prompt_embeds_size=size)
    return client


@pytest.mark.parametrize("stream", [False, True])
async def test_they_reach_the_engine_as_they_are(stream: bool) -> None:
    client = taking()
    body = {"prompt_embeds": EMBEDS, "cache_salt": "salt", "n": 2, "stream": stream}
    async with serving(client) as session:
        answer = await session.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "Hey" in answer.text or stream
    assert [request.prompt_embeds for request in client.added] == [
        PromptEmbeds("float32", (3, 4), ARRAY.tobytes())
    ] * 2
    assert [len(request.token_ids) for request in client.added] == [3, 3]
    assert client.added[0].cache_salt == "salt"
    if not stream:
        assert answer.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"prompt": "Hi"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"prompt_embeds": {**EMBEDS, "dtype": "O"}}, "prompt_embeds"),
        ({"prompt_embeds": {**EMBEDS, "shape": [3]}}, "prompt_embeds"),
        ({"prompt_embeds": {**EMBEDS, "shape": [1 << 30, 4]}}, "prompt_embeds"),
        ({"prompt_embeds": {**EMBEDS, "data": "gASV"}}, "prompt_embeds"),
        ({"prompt_embeds": "gASVCgAAAAAAAACMBXBvc2l4"}, "prompt_embeds"),
    ],
)
async def test_what_cannot_be_taken_is_refused_by_name(changed: dict[str, Any], field: str) -> None:
    async with serving(taking()) as session:
        refused = await session.post("/v1/completions", json={"prompt_embeds": EMBEDS, **changed})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"].startswith(field)


async def test_they_are_off_unless_enabled() -> None:
    async with serving(FakeClient("x")) as session:
        refused = await session.post("/v1/completions", json={"prompt_embeds": EMBEDS})
        missing = await session.post("/v1/completions", json={})
    assert refused.status_code == 400
    assert "--enable-prompt-embeds" in refused.text
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "prompt"
