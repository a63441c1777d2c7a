"""Turns: work on another thread that rests between short pieces, so that a step waits for one of them at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE = 0.002  # seconds


class Turns:
    """Steps and pieces of other work, one at a time: they would share cores and the interpreter's lock."""

    def __init__(self) -> None:
        self.step = threading.Lock()  # held while a step runs
        self._began = 0.0

    @contextmanager
    def other(self) -> Iterator[None]:
        """While work of one other thread goes on, which calls `rest` often."""
        with self.step:
            self._began = time.perf_counter()
            yield

    def rest(self) -> None:
        """Let a step run, if the piece has lasted long enough. For who is in `other`."""
        if time.perf_counter() - self._began < _PIECE:
            return
        self.step.release()
        time.sleep(_PIECE)  # else this thread would have the lock again before the other one wakes
        self.step.acquire()
        self._began = time.perf_counter()


def no_rest() -> None:
    """There are no steps beside this work."""
