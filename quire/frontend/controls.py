"""What an operator does to a running engine, from Python: the same verbs as `quire ctl` has."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any, Protocol

from quire.config.groups import ModelConfig
from quire.engine.client import EngineClient
from quire.engine.control import REPLY_LIMIT
from quire.frontend.adapters import LoRARequest, find_adapter
from quire.loader.hub import find_model
from quire.loader.pushed import PushedTensor, PushedWeights, TorchTensor
from quire.types.control import AdapterState, EngineState, LiveLimits, OpenRequests, WeightsUpdate
from quire.types.errors import EngineError, EngineUnavailableError, RequestError
from quire.types.outputs import EngineStats
from quire.types.request import AdapterRef

_LOOK_INTERVAL = 0.02  # seconds between two looks whether the engine is done with something


class Callee(Protocol):
    """The part of a client that verbs need."""

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any: ...


class AsyncControls:
    """For engines whose client is driven asynchronously."""

    _client: Callee
    _model: ModelConfig | None = None  # None: others have made the engine
    _pushed: PushedWeights | None = None  # those in place
    expert_load: dict[int, list[int]]
    """Tokens that came to each expert of each layer, if that is counted; since the engine's start."""

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

    async def push_weights(
        self, tensors: Iterable[tuple[str, TorchTensor]], requests: OpenRequests = "continue"
    ) -> None:
        """Replace the weights by these torch tensors, all of the model's by their names in its checkpoint.

        For trainers. EngineError, and no change, if they do not fit.
        """
        with _pushing(self._model) as pushed:
            await asyncio.to_thread(_add_all, pushed, tensors)
            await self.update_weights(str(pushed.finish()), requests)
        self._pushed = _instead_of(self._pushed, pushed)

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

    async def load_adapter(self, adapter: AdapterRef | LoRARequest) -> None:
        """Have the engine read and check an adapter, as the first request with it would; RequestError if not."""
        ref = _found(adapter)
        while not _is_read(await self._client.call_async("read_adapter", ref)):
            await asyncio.sleep(_LOOK_INTERVAL)

    async def unload_adapter(self, adapter: AdapterRef | LoRARequest) -> None:
        """Give back the host memory of an adapter that no open request uses; a request with it reads it again."""
        await self._client.call_async("forget_adapter", _found(adapter))

    async def _change(self, verb: str, argument: object = None) -> None:
        await self._client.call_async(verb, argument, limit=None)  # it waits for the steps in flight
        while (state := await self.state()).changing is not None:
            await asyncio.sleep(_LOOK_INTERVAL)
        if state.error is not None:
            raise EngineError(f"{verb} was not done: {state.error}")


def _found(adapter: AdapterRef | LoRARequest) -> AdapterRef:
    if isinstance(adapter, AdapterRef):
        return adapter
    ref = find_adapter(adapter)
    if ref is None:
        raise RequestError("lora_request is None but must be LoRARequest(...)", "lora_request")
    return ref


def _is_read(state: AdapterState) -> bool:
    if state.is_away:
        raise EngineUnavailableError("the engine sleeps, or its weights change; load adapters when it is awake")
    if state.error is not None:
        raise RequestError(state.error, "lora_path")
    return state.is_read


@contextmanager
def _pushing(model: ModelConfig | None) -> Iterator[PushedWeights]:
    """Weights to be pushed, which are discarded if that fails."""
    if model is None:
        raise EngineError("weights can be pushed to what was made of a model, not around an engine")
    pushed = PushedWeights(find_model(model))
    try:
        yield pushed
    except BaseException:
        pushed.discard()
        raise


def _add_all(pushed: PushedWeights, tensors: Iterable[tuple[str, TorchTensor]]) -> None:
    for name, tensor in tensors:
        pushed.add([PushedTensor.of(name, tensor)])


def _instead_of(before: PushedWeights | None, pushed: PushedWeights) -> PushedWeights:
    if before is not None:
        before.discard()
    return pushed


def add_counts(totals: dict[int, list[int]], stats: EngineStats | None) -> None:
    """Add an engine's counts of tokens to each expert, by layer."""
    for layer, counts in ({} if stats is None else stats.expert_load).items():
        totals[layer] = list(map(add, totals.get(layer, [0] * len(counts)), counts))


class ClientControls(AsyncControls):
    """The controls of an engine that nobody sends requests to yet."""

    def __init__(self, client: Callee) -> None:
        self._client = client


class Controls:
    """For engines that their caller drives."""

    _client: EngineClient
    _model: ModelConfig | None = None  # None: others have made the engine
    _is_asleep = _is_paused = False
    _pushed: PushedWeights | None = None  # those in place
    expert_load: dict[int, list[int]]
    """Tokens that came to each expert of each layer, if that is counted; since the engine's start."""

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
        """EngineError while the engine sleeps or is paused: nobody else could wake it while a caller waits."""
        if self._is_asleep:
            raise EngineError("the engine sleeps; call wake_up() first")
        if self._is_paused:
            raise EngineError("the engine is paused; call resume() first")

    def state(self) -> EngineState:
        found: EngineState = self._client.call("state")
        return found

    def pause(self) -> None:
        """Plan no more steps; until `resume`, requests are refused and streams cannot go on."""
        self._client.call("pause", True)
        self._is_paused = True

    def resume(self) -> None:
        self._client.call("pause", False)
        self._is_paused = False

    def set_limits(
        self, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
    ) -> EngineState:
        """Change limits of the scheduler, up to what the engine was started with; None: as it is."""
        limits = LiveLimits(max_num_seqs, max_num_batched_tokens)
        found: EngineState = self._client.call("set_limits", limits)
        return found

    def set_log_level(self, level: str) -> None:
        """Of the engine's log."""
        self._client.call("set_log_level", level)

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs that a server captures while it is idle; else the first step of each shape does."""
        while self._client.call("capture_next"):
            pass

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Have the engine read and check an adapter, as the first request with it would; RequestError if not."""
        ref = _found(adapter)
        while not _is_read(self._client.call("read_adapter", ref)):
            time.sleep(_LOOK_INTERVAL)

    def unload_adapter(self, adapter: LoRARequest) -> None:
        """Give back the host memory of an adapter that no open request uses; a request with it reads it again."""
        self._client.call("forget_adapter", _found(adapter))

    def update_weights(self, path: str, requests: OpenRequests = "continue") -> None:
        """Replace the weights by those of a folder of the same model.

        Streams that are open go on with them, end before ("drain"), or end now ("abort"). EngineError, and no change,
        if they do not fit.
        """
        if requests == "drain":
            self.finish_open()
        self._change("update_weights", WeightsUpdate(path, requests))

    @abstractmethod
    def finish_open(self) -> None:
        """Run what is open to its end; streams keep their outputs until they are read."""

    def push_weights(self, tensors: Iterable[tuple[str, TorchTensor]], requests: OpenRequests = "continue") -> None:
        """Replace the weights by these torch tensors, all of the model's by their names in its checkpoint.

        For trainers; otherwise like update_weights.
        """
        with _pushing(self._model) as pushed:
            _add_all(pushed, tensors)
            self.update_weights(str(pushed.finish()), requests)
        self._pushed = _instead_of(self._pushed, pushed)

    def collective_rpc(
        self, method: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `method(worker, *args, **kwargs)` with the worker of each rank, while no step is in flight.

        For trainers, in this process only. Who changes weights this way calls `reset_prefix_cache` afterwards.
        """
        return self._client.call_workers(lambda worker: method(worker, *args, **(kwargs or {})))

    def _change(self, verb: str, argument: object = None) -> None:
        self._client.call(verb, argument, limit=None)
        while (state := self._client.call("state")).changing is not None:
            time.sleep(_LOOK_INTERVAL)
        if state.error is not None:
            raise EngineError(f"{verb} was not done: {state.error}")
