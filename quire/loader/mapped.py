"""MappedFile: a file's bytes on demand, given back to the system once they were copied. Knows no format."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.types.errors import CheckpointError, MemoryPlanError
from quire.utils.units import format_bytes


class MappedFile:
    """A private mapping: the file is never written to, and pages are read when they are first touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise CheckpointError(f"{path} is empty; download it again")
                # Copy-on-write, because torch has no tensors that must not be written.
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryPlanError(
                    f"not enough memory: {path} has {format_bytes(self.size)}, for which this process has no"
                    " addresses left; raise ulimit -v"
                ) from error
            raise CheckpointError(f"cannot read {path}: {error.strerror}; check the path") from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self.buffer, np.uint8)

    def view(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """A part of the file, no copy. Not to be written to."""
        return self._bytes[start : start + num_bytes]

    def release(self, start: int, num_bytes: int) -> None:
        """These bytes need not stay in memory. Views stay valid: what is read again comes from the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):  # not on every system; there the kernel evicts pages by itself
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes:
            self.buffer.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)
