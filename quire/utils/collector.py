"""Python's garbage collector where there is much to look at and nothing to collect: at start-up, and in batches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect nothing in here; afterwards all that lives counts as old, as if it had been looked at.

    Importing torch makes a million objects, which the collector would walk over again and again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # Into the permanent generation and from there into the oldest one: nothing is walked over.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def spared_heap() -> Iterator[None]:
    """Let collections in here walk over what is made in here alone.

    Torch and others have made so much that a full one takes a tenth of a second, and a large batch causes several.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
