"""Ctrl-C between steps: an engine interrupted in the middle of one would be left half updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_afterwards() -> Iterator[Callable[[], None]]:
    """Raise a KeyboardInterrupt that arrives inside the block at its end; a second one is raised at once.

    Gives what raises one that has arrived already, for blocks of many steps: to replace the handler takes as long as
    much of what surrounds a step. Does nothing off the main thread, or where something handles Ctrl-C in its own way,
    be it such a block around this one.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield _nothing
        return
    arrived = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            signal.default_int_handler(number, frame)
        arrived = True

    def raise_arrived() -> None:
        if arrived:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield raise_arrived
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_arrived()


def _nothing() -> None:
    return None
