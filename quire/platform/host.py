"""The host: where tables are computed whose bits must not depend on the device, and what its allocator keeps."""

from __future__ import annotations

import ctypes
import sys

import torch

HOST = torch.device("cpu")


def return_free_memory() -> None:
    """Give memory that was freed back to the system, where the allocator keeps it for later (glibc's does)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # not in every libc
            libc.malloc_trim(0)
