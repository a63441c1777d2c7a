"""What the generating endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from quire.frontend.text_model import TextModel
from quire.server.generation.run import merged
from quire.types.outputs import RequestOutput
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import serving


async def test_a_request_arrives_when_its_http_request_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering and tokenization are part of the time to the first token."""
    rendered: list[float] = []
    render = TextModel.render_chat

    def render_later(self: TextModel, *args: Any, **kwargs: Any) -> str:
        rendered.append(time.monotonic())
        return render(self, *args, **kwargs)

    monkeypatch.setattr(TextModel, "render_chat", render_later)
    client = FakeClient("hi")
    begin = time.monotonic()
    async with serving(client) as session:
        await session.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        await session.post("/v1/completions", json={"prompt": "a"})
    chat, completion = client.added
    assert begin <= chat.arrival_time < rendered[0] < completion.arrival_time


async def test_other_streams_get_their_turn_between_the_prompts_of_a_batch() -> None:
    begun: list[str] = []

    async def answers(name: str) -> AsyncGenerator[RequestOutput, None]:
        begun.append(name)
        yield RequestOutput(name, None, [], [], finished=False)
        yield RequestOutput(name, None, [], [], finished=True)

    async def read() -> None:
        async with aclosing(merged(dict(enumerate(map(answers, "abc"))))) as outputs:
            async for _ in outputs:
                pass

    async def other() -> None:
        while len(begun) < 3:
            begun_then.append(len(begun))
            await asyncio.sleep(0)

    begun_then: list[int] = []
    await asyncio.wait_for(asyncio.gather(read(), other()), 10)
    assert {1, 2} <= set(begun_then)
