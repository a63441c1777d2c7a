"""What an operator does to a running engine, from Python: the same verbs as `quire ctl` has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Protocol

from quire.config.groups import ModelConfig
from quire.engine.client import EngineClient
from quire.engine.control import REPLY_LIMIT
from quire.loader.hub import find_model
from quire.loader.pushed import PushedTensor, PushedWeights, TorchTensor
from quire.types.control import EngineState, LiveLimits, OpenRequests, WeightsUpdate
from quire.types.errors import EngineError, RequestError
from quire.types.request import AdapterRef

_LOOK_INTERVAL = 0.02  # seconds between two looks whether the engine is done with something


class Callee(Protocol):
    """The part of a client that verbs need."""

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any: ...


class AsyncControls:
    """For engines whose client is driven asynchronously."""

    _client: Callee

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompt prefixes that no running request uses."""
        await self._client.call_async("reset_prefix_cache")

    async def state(self) -> EngineState:
        found: EngineState = await self._client.call_async("state")
        return found

    async def pause(self) -> None:
        """Plan no more steps; requests wait."""
        await self._client.call_async("pause", True)

    async def resume(self) -> None:
        await self._client.call_async("pause", False)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back: KV blocks, and the weights, which level 1 keeps in host memory. Requests wait."""
        await self._change("sleep", level)

    async def wake_up(self) -> None:
        """Take the memory again; requests go on from their tokens."""
        await self._change("wake")

    async def update_weights(self, path: str, requests: OpenRequests = "continue") -> None:
        """Replace the weights by those of a folder of the same model.

        EngineError, and no change, if they do not fit.
        """
        await self._change("update_weights", WeightsUpdate(path, requests))

    async def set_limits(
        self, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
    ) -> EngineState:
        """Change limits of the scheduler, up to what the engine was started with; None: as it is."""
        limits = LiveLimits(max_num_seqs, max_num_batched_tokens)
        found: EngineState = await self._client.call_async("set_limits", limits)
        return found

    async def set_log_level(self, level: str) -> None:
        """Of the engine's log."""
        await self._client.call_async("set_log_level", level)

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Have the engine read and check an adapter, as the first request with it would; RequestError if not."""
        while not (state := await self._client.call_async("read_adapter", adapter)).is_read:
            if state.error is not None:
                raise RequestError(state.error, "lora_path")
            await asyncio.sleep(_LOOK_INTERVAL)

    async def _change(self, verb: str, argument: object = None) -> None:
        await self._client.call_async(verb, argument, limit=None)  # it waits for the steps in flight
        while (state := await self.state()).changing is not None:
            await asyncio.sleep(_LOOK_INTERVAL)
        if state.error is not None:
            raise EngineError(f"{verb} was not done: {state.error}")


class ClientControls(AsyncControls):
    """The controls of an engine that nobody sends requests to yet."""

    def __init__(self, client: Callee) -> None:
        self._client = client


class Controls:
    """For engines that their caller drives."""

    _client: EngineClient
    _model: ModelConfig | None = None  # None: others have made the engine
    _is_asleep = False
    _pushed: PushedWeights | None = None  # those in place

    def reset_prefix_cache(self) -> None:
        """Forget cached prompt prefixes that no running request uses."""
        self._client.call("reset_prefix_cache")

    def sleep(self, level: int = 1) -> None:
        """Give memory back: KV blocks, and the weights, which level 1 keeps in host memory.

        Until `wake_up`, requests are refused and streams cannot go on.
        """
        self._change("sleep", level)
        self._is_asleep = True

    def wake_up(self) -> None:
        """Take the memory again; streams that are open go on from their tokens."""
        self._change("wake")
        self._is_asleep = False

    def check_awake(self) -> None:
        """EngineError while the engine sleeps: nobody else could wake it while a caller waits."""
        if self._is_asleep:
            raise EngineError("the engine sleeps; call wake_up() first")

    def update_weights(self, path: str) -> None:
        """Replace the weights by those of a folder of the same model; streams that are open go on with them.

        EngineError, and no change, if they do not fit.
        """
        self._change("update_weights", WeightsUpdate(path))

    def push_weights(self, tensors: Iterable[tuple[str, TorchTensor]]) -> None:
        """Replace the weights by these torch tensors, all of the model's by their names in its checkpoint.

        For trainers: streams that are open go on with them. EngineError, and no change, if they do not fit.
        """
        if self._model is None:
            raise EngineError("weights can be pushed to an LLM that was made of a model, not around an engine")
        pushed = PushedWeights(find_model(self._model))
        try:
            for name, tensor in tensors:
                pushed.add([PushedTensor.of(name, tensor)])
            self.update_weights(str(pushed.finish()))
        except BaseException:
            pushed.discard()
            raise
        if self._pushed is not None:
            self._pushed.discard()
        self._pushed = pushed

    def _change(self, verb: str, argument: object = None) -> None:
        self._client.call(verb, argument, limit=None)
        while (state := self._client.call("state")).changing is not None:
            time.sleep(_LOOK_INTERVAL)
        if state.error is not None:
            raise EngineError(f"{verb} was not done: {state.error}")
