"""EngineClient: the frontend's side of an engine. In-process here; other transports offer the same face.

Imports no torch: the core is imported inside `make_inproc_client`.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.engine.control import REPLY_LIMIT, Calls
from quire.types.errors import EngineDeadError, EngineError
from quire.types.messages import AbortRequests, EngineInfo
from quire.types.outputs import EngineOutputs
from quire.types.request import EngineRequest
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase, ignore_phase

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.engine.core import EngineCore
    from quire.engine.loop import EngineLoop

logger = get_logger(__name__)


class EngineClient(ABC):
    """Requests in, outputs out. An engine is driven through either the sync or the async face, not both."""

    info: EngineInfo

    @abstractmethod
    def add_request(self, request: EngineRequest) -> None:
        """Hand a request over; never blocks. A refusal comes back as an output with an error."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Stop these within one step; unknown ids are ignored. Never blocks."""

    @abstractmethod
    def get_outputs(self) -> EngineOutputs:
        """Block until a step has finished; empty when nothing is unfinished. EngineDeadError if the engine died."""

    @abstractmethod
    async def get_outputs_async(self) -> EngineOutputs:
        """Wait for the next outputs without blocking the event loop."""

    @abstractmethod
    def has_unfinished(self) -> bool: ...

    @abstractmethod
    def call(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        """Have the engine do something beside its requests (see quire/engine/control.py), after what was sent before.

        Blocks until it is done, at most `limit` seconds. EngineError if it fails or takes longer.
        """

    @abstractmethod
    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        """The same without blocking the event loop."""

    def call_workers(self, call: Callable[[Any], Any]) -> list[Any]:
        """Call something with the worker of each rank, in rank order, while no step is in flight."""
        raise EngineError(
            "collective_rpc needs the engine in this process: to another one data is sent, never pickled code; use an"
            " LLM without engine_process"
        )

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engine and free what it holds. May block for one step; may be called twice."""


class AsyncClient(EngineClient):
    """Driven through the async face only."""

    def get_outputs(self) -> EngineOutputs:
        raise EngineError("this engine is driven asynchronously; use get_outputs_async")

    def call(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        raise EngineError("this engine is driven asynchronously; use call_async")


class InProcClient(EngineClient):
    """The core in this process: stepped by the caller (sync face) or by a thread (async face)."""

    def __init__(self, core: EngineCore, loop: EngineLoop, info: EngineInfo) -> None:
        self.info = info
        self._core = core
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._outputs: asyncio.Queue[EngineOutputs | EngineError] | None = None
        self._dead: EngineError | None = None
        self._is_shut_down = False
        self._calls = Calls()
        loop.on_reply = self._calls.settle

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        self._loop.submit(request)

    def abort(self, request_ids: list[str]) -> None:
        self._loop.submit(AbortRequests(list(request_ids)))

    def call(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        if self._thread is not None:
            raise EngineError("this engine is driven asynchronously; use call_async")
        self._check_alive()
        command, future = self._calls.open(verb, argument)
        self._loop.submit(command)
        self._loop.take_messages()
        return future.result(0)

    def call_workers(self, call: Callable[[Any], Any]) -> list[Any]:
        if self._thread is not None:
            raise EngineError("this engine runs on a thread of its own; use an LLM")
        self._check_alive()
        return self._core.hold.call_workers(call)

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        self._check_alive()
        if self._outputs is None:
            self._start_thread(asyncio.get_running_loop())
        command, future = self._calls.open(verb, argument)
        self._loop.submit(command)
        return await self._calls.wait_async(command, future, limit)

    def has_unfinished(self) -> bool:
        return self._loop.has_unfinished()

    def get_outputs(self) -> EngineOutputs:
        if self._thread is not None:
            raise EngineError("this engine is driven asynchronously; use get_outputs_async")
        self._check_alive()
        try:
            return self._loop.run_once()
        except EngineError as error:
            self._dead = error
            raise

    async def get_outputs_async(self) -> EngineOutputs:
        self._check_alive()
        if self._outputs is None:
            self._start_thread(asyncio.get_running_loop())
        assert self._outputs is not None
        outputs = await self._outputs.get()
        if isinstance(outputs, EngineError):
            self._dead = outputs
            raise outputs
        return outputs

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._dead = self._dead or EngineDeadError("the engine was shut down")
        self._loop.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self._core.shutdown()
        self._calls.fail_all(EngineDeadError("the engine was shut down"))

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead

    def _start_thread(self, event_loop: asyncio.AbstractEventLoop) -> None:
        outputs: asyncio.Queue[EngineOutputs | EngineError] = asyncio.Queue()
        self._outputs = outputs

        def emit(item: EngineOutputs | EngineError) -> None:
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(outputs.put_nowait, item)

        def run() -> None:
            try:
                while self._loop.wait():
                    result = self._loop.run_once()
                    if result.outputs or result.stats is not None:
                        emit(result)
            except Exception as error:  # the thread's end must reach whoever waits for outputs
                logger.error("the engine loop died", exc_info=error)
                end = error if isinstance(error, EngineError) else EngineDeadError(f"the engine loop died: {error!r}")
            else:
                end = EngineDeadError("the engine was shut down")
            emit(end)
            self._calls.fail_all(end)

        self._thread = threading.Thread(target=run, name="quire-engine", daemon=True)
        self._thread.start()


def make_inproc_client(config: EngineConfig, report: ReportPhase = ignore_phase) -> EngineClient:
    """Load the model in this process and wire scheduler, KV manager, worker and loop; `report` hears of phases."""
    from quire.engine.build import build_engine
    from quire.engine.loop import EngineLoop

    core, info, debug_checks = build_engine(config, report)
    return InProcClient(core, EngineLoop(core, debug_checks=debug_checks), info)
