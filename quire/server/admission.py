"""The bounded queue: how many completions may be open at once, counted where requests come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.types.errors import QueueFullError, RequestError


class Admission:
    """Counts open completions. Those beyond what the engine runs at once are waiting; the queue is bounded."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._num_open = 0
        self.watchers: list[Callable[[], None]] = []
        """Called whenever completions have come or gone."""

    @property
    def num_open(self) -> int:
        return self._num_open

    @contextmanager
    def enter(self, count: int, max_num_seqs: int, field: str) -> Iterator[None]:
        """Hold `count` places. QueueFullError while the queue is full, RequestError if it could never take them."""
        limit = max_num_seqs + self._max_queue
        if count > limit:
            raise RequestError(
                f"the request asks for {count} completions but this server takes {limit} at once; send fewer", field
            )
        if self._num_open + count > limit:
            raise QueueFullError(
                f"{self._num_open} completions are running or waiting, and the queue takes {self._max_queue} beyond"
                f" the {max_num_seqs} that run; try again later"
            )
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def _add(self, count: int) -> None:
        self._num_open += count
        for watch in self.watchers:
            watch()
