"""KeepAlive: puts an idle engine to sleep after the time that Ollama's clients ask for; the next request wakes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from quire.server.admission import Admission
from quire.server.control.operator import SleepWanted
from quire.types.errors import EngineError
from quire.utils.log import get_logger

logger = get_logger(__name__)


class Sleeper(Protocol):
    """What is needed of an EngineOperator."""

    @property
    def is_asleep(self) -> bool: ...

    async def sleep(self, wanted: SleepWanted) -> Any: ...

    async def wake(self) -> Any: ...


class KeepAlive:
    """Used on the event loop. An engine that an operator has put to sleep is left alone."""

    def __init__(self, admission: Admission, engine: Sleeper) -> None:
        self._admission = admission
        self._engine = engine
        self._seconds: float | None = None
        self._sleeps_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_slept = False  # the engine sleeps, or is about to, because of this
        self._is_waking = False
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        admission.watchers.append(self._look)

    @property
    def expires_at(self) -> float | None:
        """When the engine will sleep, in seconds since 1970; None: not by itself."""
        return self._sleeps_at

    @property
    def is_asleep(self) -> bool:
        """While it wakes it counts as awake: its answer may be out before the word that it is."""
        return self._has_slept and not self._is_waking

    def want(self, seconds: float | None, *, from_now: bool) -> None:
        """Keep the idle engine awake for this time, None: for ever. Unless `from_now`, it begins after a request."""
        self._seconds = seconds
        if from_now:
            self._look()

    def _look(self) -> None:
        """Requests came or went, or the time was changed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._sleeps_at = None
        if self._admission.num_open:
            if self._has_slept:
                self._begin(self._wake())
        elif self._seconds is not None and not self._has_slept:
            self._sleeps_at = time.time() + self._seconds
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_time)

    def _on_time(self) -> None:
        self._timer = self._sleeps_at = None
        self._begin(self._sleep())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="quire-keep-alive")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sleep(self) -> None:
        async with self._changing:
            if self._admission.num_open or self._engine.is_asleep:
                return
            self._has_slept = True
            try:
                await self._engine.sleep(SleepWanted())
            except EngineError as error:
                self._has_slept = False
                logger.warning("the engine is kept awake: %s", error)

    async def _wake(self) -> None:
        async with self._changing:
            if not self._has_slept:
                return
            self._is_waking = True
            try:
                await self._engine.wake()
            except EngineError as error:
                logger.error("the engine cannot be woken: %s", error)
            self._has_slept = self._is_waking = False
            self._look()  # the request that woke it may be over already
