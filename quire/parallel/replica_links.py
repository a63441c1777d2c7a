"""What processes that are launched one by one reach each other by. Imports no torch, as who launches them."""

from __future__ import annotations

import os
import tempfile


def nameless_file() -> int:
    """A file that processes share by its descriptor, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire")
    with tempfile.TemporaryFile() as file:  # not Linux
        return os.dup(file.fileno())


def make_replica_links(size: int) -> list[int]:
    """Descriptors of shared memory, and of a pipe to be woken by for each: the end to read, and the one to write."""
    return [nameless_file(), *(end for _ in range(size) for end in os.pipe())]
