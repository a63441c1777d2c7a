"""Adapters of requests: read by the worker before a request is scheduled, kept in host memory while it is open."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING

from quire.engine.control import Verb
from quire.types.control import AdapterState
from quire.types.errors import ConfigError, QuireError, RequestError
from quire.types.request import AdapterRef, EngineRequest
from quire.worker.executor import Executor

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

_PATIENCE = 10.0  # seconds between two questions about an adapter, after which nobody waits for it


class AdapterReader:
    """A condition of requests: their adapters are in the worker's host memory. See engine/parked.py."""

    name = "adapter"

    def __init__(self, executor: Executor, max_kept: int) -> None:
        """`max_kept`: adapters in host memory; requests wait for room, what an operator loads does not."""
        self._executor, self._max_kept = executor, max_kept
        self._reading: OrderedDict[str, Future[int]] = OrderedDict()  # by digest, the least recently used first
        self._queued: dict[str, AdapterRef] = {}  # of these, those that wait for room, by digest
        self._open: dict[str, str] = {}  # request -> digest
        self._users: Counter[str] = Counter()
        self._asked: dict[str, float] = {}  # digest -> when `state` was last asked for it, and has not told its end

    def applies(self, request: EngineRequest) -> bool:
        return request.adapter is not None

    def begin(self, request: EngineRequest) -> Future[int]:
        assert request.adapter is not None
        digest = request.adapter.digest
        self._open[request.request_id] = digest
        self._users[digest] += 1
        if digest not in self._reading:
            self._reading[digest], self._queued[digest] = Future(), request.adapter
        elif digest not in self._queued:
            return self.read(request.adapter)
        self._evict()
        return self._reading[digest]

    def take(self, request: EngineRequest, found: int) -> None:
        return None

    def forget(self, request_id: str) -> None:
        digest = self._open.pop(request_id, None)
        if digest is not None:
            self._users[digest] -= 1
            if not self._users[digest] and digest in self._queued:
                del self._queued[digest], self._reading[digest], self._users[digest]
            self._evict()

    def read(self, ref: AdapterRef) -> Future[int]:
        """Completed when it is in host memory, with its bytes there, or with a RequestError."""
        digest = ref.digest
        known = self._reading.get(digest)
        if known is None or digest in self._queued or (known.done() and known.exception() is not None):
            told = self._reading[digest] if self._queued.pop(digest, None) else Future()
            self._reading[digest] = _for_request(self._executor.read_adapter(ref), told)
        self._reading.move_to_end(digest)
        self._evict()
        return self._reading[digest]

    def state(self, ref: AdapterRef) -> AdapterState:
        """Start the reading, or tell how far it is. It stays in host memory until its end was told."""
        is_new = ref.digest not in self._asked
        self._asked[ref.digest] = time.monotonic()
        if is_new:
            self.read(ref)
        reading = self._reading[ref.digest]
        if not reading.done():
            return AdapterState(is_read=False)
        del self._asked[ref.digest]
        self._evict()
        error = reading.exception()
        return AdapterState(error is None, None if error is None else str(error))

    def forget_adapter(self, ref: AdapterRef) -> None:
        """Give its host memory back, unless a request needs it."""
        if self._is_idle(ref.digest):
            self._drop(ref.digest)
            self._evict()

    def shutdown(self) -> None:
        return None

    def _is_idle(self, digest: str) -> bool:
        reading = self._reading.get(digest)
        return reading is not None and reading.done() and not self._users[digest] and digest not in self._asked

    def _evict(self) -> None:
        late = time.monotonic() - _PATIENCE
        for digest in [digest for digest, asked in self._asked.items() if asked < late]:
            del self._asked[digest]  # whoever asked has gone
        excess = len(self._reading) - self._max_kept
        for digest in [digest for digest in self._reading if self._is_idle(digest)][: max(0, excess)]:
            self._drop(digest)
        room = self._max_kept - len(self._reading) + len(self._queued)
        for ref in list(self._queued.values())[: max(0, room)]:
            self.read(ref)

    def _drop(self, digest: str) -> None:
        del self._reading[digest], self._users[digest]
        self._executor.forget_adapter(digest)


def _for_request(reading: Future[int], told: Future[int]) -> Future[int]:
    """`told` with the same end, but what is wrong with an adapter is the fault of the requests that name it."""

    def tell(done: Future[int]) -> None:
        error = done.exception()
        if error is None:
            told.set_result(done.result())
        else:
            told.set_exception(RequestError(str(error), "model") if isinstance(error, QuireError) else error)

    reading.add_done_callback(tell)
    return told


def _reader(core: EngineCore) -> AdapterReader:
    for found in core.parked.conditions:
        if isinstance(found, AdapterReader):
            return found
    raise ConfigError("adapters are not enabled; start the engine with --enable-lora")


def _read_adapter(core: EngineCore, ref: AdapterRef) -> AdapterState:
    reader = _reader(core)
    return AdapterState(is_read=False, is_away=True) if core.hold.is_away else reader.state(ref)


READ_ADAPTER = Verb(_read_adapter, AdapterRef, AdapterState)
"""Check an adapter and bring it into host memory: starts it, and says how far it is. To be asked until it is done."""
FORGET_ADAPTER = Verb(lambda core, ref: _reader(core).forget_adapter(ref), AdapterRef)
"""Give back the host memory of an adapter that no request uses."""
