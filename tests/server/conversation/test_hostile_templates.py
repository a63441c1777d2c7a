"""A template that never ends is refused, and nobody else waits for it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.frontend.template_process import TemplateProcesses
from quire.frontend.text_model import TextModel
from quire.server.context import TemplateThreads
from quire.types.errors import QueueFullError
from tests.frontend.fake_client import TOKENIZER, FakeClient
from tests.server.helpers import FakeProvider, http, make_app

SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def in_order(session: httpx.AsyncClient, body: dict[str, object]) -> tuple[httpx.Response, list[str]]:
    """The answer to a chat, and what was finished first: it or the /health that was asked for after it."""
    finished: list[str] = []
    chat = asyncio.create_task(session.post("/v1/chat/completions", json=body))
    chat.add_done_callback(lambda _: finished.append("chat"))
    await asyncio.sleep(0)
    assert (await session.get("/health")).status_code == 200
    finished.append("health")
    return await chat, finished


@pytest.mark.parametrize("own", [False, True])
async def test_health_does_not_wait_for_a_template(own: bool) -> None:
    text = TextModel(TOKENIZER, chat_template=SLOW if own else None)
    text.isolate_templates()
    text._own_processes = text._foreign_processes = TemplateProcesses(max_seconds=0.3)
    provider = FakeProvider(FakeClient("x"), text)
    async with http(make_app(provider=provider, allow_request_chat_template=True)) as session:
        answer, finished = await in_order(session, CHAT if own else CHAT | {"chat_template": SLOW})
        assert answer.status_code == 400
        assert "ran for more than" in answer.json()["error"]["message"]
        assert finished == ["health", "chat"]
        fine = await session.post("/v1/chat/completions", json=CHAT | {"chat_template": "fine"})
        assert fine.status_code == 200
    text._own_processes.close()


async def test_not_many_templates_wait() -> None:
    threads = TemplateThreads(num_threads=1, max_waiting=1)
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> int:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
        return 7

    waiting = [asyncio.create_task(threads.run(work)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 chat templates"):
        await threads.run(work)
    released.set()
    assert await asyncio.gather(*waiting) == [7, 7]
