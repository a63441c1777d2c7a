"""Engines that die at chosen moments, and what a supervisor does about it, in virtual time: no process, no clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from quire.engine.resuming import EngineLoss, ResumingClient
from quire.types.errors import EngineDeadError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import VOCAB_SIZE, Answer, FakeClient, logprobs_of

KillNow = Callable[["MortalClient"], bool]


def never(client: MortalClient) -> bool:
    return False


class MortalClient(FakeClient):
    """Computes prompts in chunks; before a step, and after it with its outputs unread, `kills` may end it."""

    def __init__(
        self, answer: Answer | str, *, kills: KillNow = never, prefill: int = 1 << 30, chunk: int = 1, **options: Any
    ) -> None:
        super().__init__(answer, chunk=chunk, **options)
        self.info = EngineInfo(VOCAB_SIZE, 1 << 20, 16, 1 << 16, 64)
        self._kills = kills
        self._prefill = prefill
        self._computed: dict[str, int] = {}

    @property
    def running(self) -> list[EngineRequest]:
        return [running.request for running in self._running.values()]

    def num_generated(self, request: EngineRequest) -> int:
        return self._running[request.request_id].num_tokens

    def kill(self) -> None:
        self.died.set()
        self._wake.set()

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        assert request.grammar is None or self.vocabulary is not None, "the vocabulary comes before grammars"
        super().add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        if not self.died.is_set():
            super().abort(request_ids)

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = None) -> None:
        await asyncio.sleep(0)
        self._check_alive()
        await super().call_async(verb, argument)

    async def get_outputs_async(self) -> EngineOutputs:
        await asyncio.sleep(0)
        while not self.has_unfinished():
            self._check_alive()
            self._wake.clear()
            await self._wake.wait()
        if not self.died.is_set() and self._kills(self):
            self.kill()
        self._check_alive()
        outputs = self.get_outputs()
        if self._kills(self):
            # It was received, and its reader has not come to it when the end is noticed.
            self._said = outputs.outputs
            self.kill()
            self._check_alive()
        return outputs

    def _check_alive(self) -> None:
        if self.died.is_set():
            raise EngineDeadError("killed")

    def _step(self, running: Any) -> EngineOutput:
        request = running.request
        done = self._computed.get(request.request_id, 0)
        end = min(done + self._prefill, len(request.token_ids))
        self._computed[request.request_id] = end
        output = super()._step(running) if end == len(request.token_ids) else EngineOutput(request.request_id, [])
        if output.finish_reason is not None:
            del self._computed[request.request_id]
        params = request.params
        assert isinstance(params, SamplingParams)
        said: list[Any] | None = None
        if params.prompt_logprobs is not None and not request.num_given_outputs and done < end:
            said = [logprobs_of(token, params.prompt_logprobs) for token in request.token_ids[max(done, 1) : end]]
        return EngineOutput(
            output.request_id,
            output.token_ids,
            output.finish_reason,
            output.stop_reason,
            output.logprobs,
            said,
            output.num_cached_tokens,
            output.error,
        )


class Keeper:
    """Gives a ResumingClient one engine after the other, as the supervisor does with processes."""

    def __init__(self, make: Callable[[], MortalClient | FakeClient], chance: random.Random | None = None) -> None:
        self._make = make
        self._chance = chance or random.Random(0)
        self.engines: list[Any] = [make()]
        self.losses: list[EngineLoss] = []
        self.client = ResumingClient(self.engines[0].info)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _keep(self) -> None:
        while True:
            engine = self.engines[-1]
            with suppress(EngineDeadError):
                await self.client.attach(engine)
                await engine.died.wait()
            for _ in range(self._chance.randint(0, 3)):
                await asyncio.sleep(0)
            self.losses.append(self.client.lose("killed"))
            for _ in range(self._chance.randint(0, 3)):
                await asyncio.sleep(0)
            self.engines.append(self._make())


def seeded(texts: Sequence[str]) -> Answer:
    """An answer that depends on the prompt and the seed, as sampling does."""

    def answer(request: EngineRequest) -> Sequence[int]:
        chance = random.Random(f"{request.token_ids} {request.seed}")
        return " ".join(chance.choices(texts, k=12)).encode()

    return answer
