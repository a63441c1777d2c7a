"""What the generating endpoints share."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.frontend.text_model import TextModel
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
