"""ConsoleFeed: frames about the server and its engine for all who look, made only while somebody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

import quire
from quire.server.admin import EngineSummary
from quire.server.console.monitor import ConsoleMonitor, Ended, Line, Load, Marks, Restart, Sample
from quire.server.context import HealthReport
from quire.types.console import ConsoleQuery, EngineView, RequestView
from quire.types.errors import EngineError, EngineUnavailableError, QueueFullError
from quire.types.messages import EngineInfo
from quire.utils.log import get_logger

logger = get_logger(__name__)

INTERVAL = 0.5
"""Seconds between two frames."""
MOST_READERS = 16
_MOST_UNREAD = 4  # frames of a reader that is slow; older ones are dropped
_LONGEST_PROMPT = 4000  # characters of a prompt that are shown


class Hello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    version: str
    models: Sequence[str]
    engine: EngineSummary | None
    interval: float
    shows_text: bool
    history: list[Sample]
    ended: list[Ended]
    log: list[Line]
    restarts: list[Restart]


class Frame(msgspec.Struct, frozen=True, tag_field="type", tag="frame"):
    at: float
    status: str
    detail: str
    load: Load
    engine: EngineView | None
    ended: list[Ended]
    log: list[Line]
    restarts: list[Restart]


class WatchedEngine(Protocol):
    """What a feed needs of an AsyncEngine."""

    @property
    def info(self) -> EngineInfo: ...

    async def console(self, query: ConsoleQuery) -> EngineView: ...

    def held_requests(self, why: str) -> list[RequestView]: ...

    def prompt_of(self, engine_id: str) -> str | None: ...


class WatchedProvider(Protocol):
    @property
    def engine(self) -> WatchedEngine:
        """EngineUnavailableError while there is none."""
        ...

    def health(self) -> HealthReport: ...


class ConsoleFeed:
    """One for all readers of a server: what they see costs the same, however many they are."""

    def __init__(
        self,
        provider: WatchedProvider,
        monitor: ConsoleMonitor,
        model_names: Sequence[str],
        *,
        shows_text: bool = False,
        interval: float = INTERVAL,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_ending`: whether the server is about to stop, so that streams have to end."""
        self._provider = provider
        self._monitor = monitor
        self._model_names = model_names
        self._shows_text = shows_text
        self._interval = interval
        self._is_ending = is_ending
        self._readers: list[asyncio.Queue[bytes | None]] = []
        self._task: asyncio.Task[None] | None = None
        self._query = ConsoleQuery()
        self._num_starts = 0

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Lines of JSON until the server stops. QueueFullError if too many read already."""
        if len(self._readers) >= MOST_READERS:
            raise QueueFullError(f"{MOST_READERS} consoles are open already; close one")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_UNREAD)
        self._readers.append(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="quire-console")
        try:
            yield _line(self._hello())
            while (line := await queue.get()) is not None:
                yield line
        finally:
            self._readers.remove(queue)

    async def _run(self) -> None:
        """Tell all readers, until there are none or the server ends."""
        try:
            while self._readers and not self._is_ending():  # some may come while the recording is being stopped
                await self._tell_readers()
                await self._stop_recording()
        except Exception:
            logger.exception("the console cannot go on")
        finally:
            self._task = None
            for reader in self._readers:
                _put(reader, None)

    async def _tell_readers(self) -> None:
        marks, *_ = self._monitor.begin()
        looking: asyncio.Task[EngineView | None] | None = None
        try:
            while self._readers and not self._is_ending():
                begin = time.monotonic()
                looking = looking or asyncio.create_task(self._look())
                await asyncio.wait({looking}, timeout=self._interval)
                view = None
                if looking.done():
                    view, looking = looking.result(), None
                line = _line(self.frame(view, marks))
                for reader in self._readers:
                    _put(reader, line)
                await asyncio.sleep(max(0.0, self._interval - (time.monotonic() - begin)))
        finally:
            if looking is not None:
                looking.cancel()

    async def _look(self) -> EngineView | None:
        if self._monitor.num_starts != self._num_starts:  # another engine, which counts from 0
            self._num_starts, self._query = self._monitor.num_starts, ConsoleQuery()
        try:
            view = await self._provider.engine.console(self._query)
        except EngineError:  # there is none, or it has died: the frame's status says so
            return None
        self._query = ConsoleQuery(
            view.steps[-1].id if view.steps else self._query.after_step,
            view.events[-1].number if view.events else self._query.after_event,
        )
        return view

    async def _stop_recording(self) -> None:
        with suppress(EngineError, asyncio.TimeoutError):
            async with asyncio.timeout(self._interval * 4):
                await self._provider.engine.console(ConsoleQuery(stop=True))

    def _hello(self) -> Hello:
        try:
            engine = msgspec.convert(self._provider.engine.info, EngineSummary, from_attributes=True)
        except EngineUnavailableError:
            engine = None
        _, ended, lines, restarts = self._monitor.begin()
        history = self._monitor.history()
        return Hello(
            quire.__version__,
            self._model_names,
            engine,
            self._interval,
            self._shows_text,
            history,
            ended,
            lines,
            restarts,
        )

    def frame(self, view: EngineView | None, marks: Marks) -> Frame:
        """What readers are sent of the server, and of its engine if there is a view of it."""
        health = self._provider.health()
        if view is None and health.status not in ("ready", "draining"):
            view = EngineView(time.time(), self._held(f"the engine is {health.status}: {health.detail}"))
        if view is not None and self._shows_text:
            view = msgspec.structs.replace(view, requests=self._with_text(view.requests))
        load = self._monitor.load(marks)
        return Frame(time.time(), health.status, health.detail, load, view, *self._monitor.news(marks))

    def _held(self, why: str) -> list[RequestView]:
        try:
            return self._provider.engine.held_requests(why)
        except EngineUnavailableError:
            return []

    def _with_text(self, requests: list[RequestView]) -> list[RequestView]:
        try:
            engine = self._provider.engine
        except EngineUnavailableError:
            return requests
        shown = ((request, engine.prompt_of(request.id)) for request in requests)
        return [
            request if prompt is None else msgspec.structs.replace(request, prompt=prompt[:_LONGEST_PROMPT])
            for request, prompt in shown
        ]


def _put(reader: asyncio.Queue[bytes | None], line: bytes | None) -> None:
    if reader.full():
        reader.get_nowait()
    reader.put_nowait(line)


def _line(message: Hello | Frame) -> bytes:
    return msgspec.json.encode(message) + b"\n"
