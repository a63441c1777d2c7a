"""Runs that go on without their client: their events are kept, for readers that come, go and come back."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence

from quire.server.sse import ACCEPTED, KEEP_ALIVE


class DetachedRun:
    """The events of one response, each at the place that its sequence number says."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self.num_bytes = 0
        self.is_done = False
        self._changed = asyncio.Event()

    @property
    def events(self) -> Sequence[bytes]:
        return self._events

    def add(self, events: Iterable[bytes]) -> None:
        for encoded in events:
            self._events.append(encoded)
            self.num_bytes += len(encoded)
        self._tell()

    def finish(self) -> None:
        self.is_done = True
        self._tell()

    async def wait(self) -> None:
        """Wait until there is something new."""
        await self._changed.wait()

    async def read(self, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events behind a sequence number, those to come too, to the end of the run."""
        yield ACCEPTED
        index, has_said = starting_after + 1, False
        while True:
            changed = self._changed
            while index < len(self._events):
                has_said = True
                index += 1
                yield self._events[index - 1]
            if self.is_done and index >= len(self._events):
                if not has_said:
                    yield KEEP_ALIVE  # a stream without a word would have no headers
                return
            if changed is self._changed:
                await self.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class DetachedRuns:
    """Runs by response. Of those that are done, the oldest go when there are too many events."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._runs: OrderedDict[str, DetachedRun] = OrderedDict()

    def open(self, response_id: str) -> DetachedRun:
        self._trim()
        run = self._runs[response_id] = DetachedRun()
        return run

    def get(self, response_id: str) -> DetachedRun | None:
        return self._runs.get(response_id)

    def forget(self, response_id: str) -> None:
        self._runs.pop(response_id, None)

    def _trim(self) -> None:
        total = sum(run.num_bytes for run in self._runs.values())
        for name, run in list(self._runs.items()):
            if total <= self._max_bytes:
                return
            if run.is_done:
                total -= run.num_bytes
                del self._runs[name]
