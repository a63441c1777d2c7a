"""Ctrl-C between steps: an engine interrupted in the middle of one would be left half updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Raise a KeyboardInterrupt that arrives inside the block at its end; a second one is raised at once.

    Does nothing off the main thread, or where the program handles Ctrl-C in its own way.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    arrived = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            signal.default_int_handler(number, frame)
        arrived = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt
