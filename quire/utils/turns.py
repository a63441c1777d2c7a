"""Turns: work on another thread that rests between short pieces, so that a step waits for one of them at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE = 0.002  # seconds
_IDLE_AFTER = 0.05  # seconds after the last step; before, the next is on its way and needs the interpreter


class StepTurn:
    """A context: a step runs. One thread has steps."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_waiting, self.ended = False, 0.0

    def __enter__(self) -> None:
        self.is_waiting = True
        self.lock.acquire()
        self.is_waiting = False

    def __exit__(self, *exc_info: object) -> None:
        self.ended = time.perf_counter()
        self.lock.release()


class Turns:
    """Steps and pieces of other work, one at a time: they would share cores and the interpreter's lock."""

    def __init__(self) -> None:
        self.step = StepTurn()
        self._began = 0.0

    @contextmanager
    def other(self) -> Iterator[None]:
        """While work of one other thread goes on, which calls `rest` often."""
        with self.step.lock:
            self._began = time.perf_counter()
            yield

    def rest(self) -> None:
        """Let a step run, if the piece has lasted long enough and the engine is busy. For who is in `other`."""
        now = time.perf_counter()
        if now - self._began < _PIECE:
            return
        if self.step.is_waiting or now - self.step.ended < _IDLE_AFTER:
            self.step.lock.release()
            time.sleep(_PIECE)  # else this thread would have the lock again before the other one wakes
            self.step.lock.acquire()
        self._began = time.perf_counter()


def no_rest() -> None:
    """There are no steps beside this work."""
