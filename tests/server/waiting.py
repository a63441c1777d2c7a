"""Engines that let their clients wait for the first token, and requests to every endpoint that streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from quire.types.errors import EngineDeadError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs
from tests.frontend.fake_client import VOCAB_SIZE, Answer, FakeClient, echo
from tests.server.helpers import LONG

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 64},
}


class WaitingClient(FakeClient):
    """Before each request's first token it waits: for `seconds`, or until it is told to go on or to fail."""

    def __init__(self, answer: Answer | str = echo, seconds: float | None = None, **options: Any) -> None:
        super().__init__(answer, **options)
        self.info = EngineInfo(VOCAB_SIZE, LONG, 16, 64, 8)
        self._seconds = seconds
        self._told = asyncio.Event()
        self._refusal: tuple[str, str] | None = None
        self._is_dead = False
        self._num_begun = 0

    def go_on(self) -> None:
        self._told.set()

    def refuse(self, message: str, field: str) -> None:
        """Find the requests wrong, as an engine does that cannot compile a grammar."""
        self._refusal = message, field
        self._told.set()

    def die(self) -> None:
        self._is_dead = True
        self.died.set()
        self._told.set()

    async def get_outputs_async(self) -> EngineOutputs:
        while not self.has_unfinished():
            self._wake.clear()
            await self._wake.wait()
        if self._num_begun < len(self.added) and not self._said:
            await self._wait()
            self._num_begun = len(self.added)
        if self._is_dead:
            raise EngineDeadError("the fake engine died as it was told to")
        await asyncio.sleep(0)
        return EngineOutputs(self._refused(*self._refusal)) if self._refusal else self.get_outputs()

    async def _wait(self) -> None:
        if self._seconds is not None:
            await asyncio.sleep(self._seconds)
        else:
            await self._told.wait()

    def _refused(self, message: str, field: str) -> Sequence[EngineOutput]:
        ids, self._refusal = list(self._running), None
        self._running.clear()
        return [EngineOutput(i, [], finish_reason="error", error=message, error_field=field) for i in ids]
