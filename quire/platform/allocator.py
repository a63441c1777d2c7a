"""What the C library's allocator keeps of memory that was freed. Imports no torch: the API process needs it too."""

from __future__ import annotations

import ctypes
import sys

# glibc's names of its settings, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT = 128 << 10  # bytes; glibc begins with as much and raises it to 32 MB after one large allocation


def return_free_memory() -> None:
    """Give memory that was freed back to the system, where the allocator keeps it for later (glibc's does)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # not in every libc
            libc.malloc_trim(0)


def keep_little_free_memory() -> None:
    """From now on give freed memory back at once. For a process that computes little; call it before threads start.

    Left alone, glibc has an arena for each thread and keeps most of what large requests have taken, so that a process
    which holds no more objects than before still grows.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            for setting, value in ((_MMAP_THRESHOLD, _KEPT), (_TRIM_THRESHOLD, _KEPT), (_ARENA_MAX, 1)):
                libc.mallopt(setting, value)
