"""EngineOperator: what an operator does to the engine, remembered so that a new process gets the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, Protocol

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.hold_verbs import set_level
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.controls import Callee, ClientControls
from quire.loader.hub import find_model
from quire.loader.pushed import PushedTensor, PushedWeights
from quire.types.control import EngineState, LiveLimits, OpenRequests, WeightsUpdate
from quire.types.errors import ConfigError, EngineDeadError, EngineError, QuireError, RequestError

Word = Literal["asleep", "paused", "changing"]


class SleepWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: int = 1  # 1: weights stay in host memory, 2: they are dropped
    requests: Literal["wait", "refuse"] = "wait"  # those that come meanwhile


class PushedSoFar(msgspec.Struct, frozen=True):
    num_tensors: int
    num_bytes: int


class Wanted:
    """What the operator wants of the engine, whichever process it is."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        """With the model whose weights are in place, or are being put there."""
        self.level = 0  # of its sleep
        self.refuses = False
        self.is_paused = False
        self.is_changing = False
        self.changing_since = 0.0  # on the monotonic clock
        self.limits = LiveLimits()
        self.log_level: str | None = None

    @property
    def word(self) -> Word | None:
        """What keeps the engine from running requests; None: nothing."""
        if self.level:
            return "asleep"
        return "changing" if self.is_changing else "paused" if self.is_paused else None

    async def tell(self, client: Callee) -> None:
        """Let a new engine be as the one before it; no request has been sent to it."""
        engine = ClientControls(client)
        if self.log_level is not None:
            await engine.set_log_level(self.log_level)
        if self.limits != LiveLimits():
            await client.call_async("set_limits", self.limits)
        if self.is_paused:
            await engine.pause()
        if self.level:
            await engine.sleep(self.level)


class Operated(Protocol):
    """What the operator needs of a supervisor."""

    wanted: Wanted

    @property
    def operated_engine(self) -> AsyncEngine:
        """The engine that takes requests, also one that sleeps; EngineUnavailableError if none does."""
        ...


class EngineOperator:
    """What was asked for is remembered once it is done. New weights and waking are before: no crash undoes them."""

    def __init__(self, supervisor: Operated) -> None:
        self._supervisor = supervisor
        self._wanted = supervisor.wanted
        self._pushing: PushedWeights | None = None
        self._pushed: PushedWeights | None = None  # those in place
        self._push_turn = asyncio.Lock()

    @property
    def is_asleep(self) -> bool:
        return self._wanted.level > 0

    async def state(self) -> EngineState:
        return await self._engine.state()

    async def sleep(self, wanted: SleepWanted) -> EngineState:
        await self._changing(self._engine.sleep(wanted.level))
        self._wanted.level, self._wanted.refuses = wanted.level, wanted.requests == "refuse"
        return await self.state()

    async def wake(self) -> EngineState:
        """It counts as changing from here on: its first answers may be out before the word that it is awake."""
        wanted = self._wanted
        before = wanted.level, wanted.refuses
        waking = self._changing(self._engine.wake_up())
        wanted.level, wanted.refuses = 0, False
        try:
            await waking
        except EngineDeadError:  # the next one comes awake
            raise
        except EngineError:
            wanted.level, wanted.refuses = before
            raise
        return await self.state()

    async def update_weights(self, update: WeightsUpdate) -> EngineState:
        wanted, before = self._wanted, self._wanted.config
        if before.device.standby:
            raise ConfigError("the standby engine has the old weights; update_weights works without --standby")
        wanted.config = before.with_model(update.path)
        try:
            await self._changing(self._engine.update_weights(update.path, update.requests))
        except EngineDeadError:  # the next one comes with the new weights, or not at all
            raise
        except QuireError:
            wanted.config = before
            raise
        return await self.state()

    async def push(self, tensors: Sequence[PushedTensor], *, start_over: bool) -> PushedSoFar:
        """Take some of the weights that `apply_pushed` will put in place."""
        async with self._push_turn:
            if start_over:
                self._drop_pushing()
            if self._pushing is None:
                self._pushing = PushedWeights(await asyncio.to_thread(find_model, self._wanted.config.model))
            await asyncio.to_thread(self._pushing.add, tensors)
            return PushedSoFar(self._pushing.num_tensors, self._pushing.num_bytes)

    async def apply_pushed(self, requests: OpenRequests) -> EngineState:
        """Put the pushed weights in place; if they do not fit they are dropped, and nothing has changed."""
        async with self._push_turn:
            if self._pushing is None:
                raise RequestError("no tensors were pushed; push those of the model first", "tensors")
            pushed = self._pushing
            try:
                state = await self.update_weights(WeightsUpdate(str(pushed.finish()), requests))
            except EngineDeadError:  # the next engine comes with them, or not at all
                self._keep(pushed)
                raise
            except QuireError:
                self._drop_pushing()
                raise
            self._keep(pushed)
            return state

    def _keep(self, pushed: PushedWeights) -> None:
        if self._pushed is not None:
            self._pushed.discard()
        self._pushed, self._pushing = pushed, None

    def _drop_pushing(self) -> None:
        if self._pushing is not None:
            self._pushing.discard()
        self._pushing = None

    async def pause(self, is_paused: bool) -> EngineState:
        engine = self._engine
        await (engine.pause() if is_paused else engine.resume())
        self._wanted.is_paused = is_paused
        return await self.state()

    async def set_limits(self, limits: LiveLimits) -> EngineState:
        state = await self._engine.set_limits(
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        self._wanted.limits = LiveLimits(state.max_num_seqs, state.max_num_batched_tokens)
        return state

    async def set_log_level(self, level: str) -> None:
        set_level(level)
        await self._engine.set_log_level(level)
        self._wanted.log_level = level

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def expert_load(self) -> dict[int, list[int]]:
        """Tokens by layer and expert since the engine's start; ConfigError if they are not counted."""
        if not self._wanted.config.parallel.counts_experts:
            raise ConfigError("the tokens of experts are not counted; start the server with --expert-load-stats")
        return self._engine.expert_load

    @property
    def _engine(self) -> AsyncEngine:
        return self._supervisor.operated_engine

    async def _changing(self, work: Coroutine[Any, Any, None]) -> None:
        if self._wanted.is_changing:
            work.close()
            raise EngineError("the engine is being changed already; wait until that has ended")
        self._wanted.is_changing, self._wanted.changing_since = True, time.monotonic()
        try:
            await work
        finally:
            self._wanted.is_changing = False
