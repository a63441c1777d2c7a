"""Memory that processes on one host share, and the CPU's collectives through it. See kernels/cpu/collectives.cpp."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.library import bound, unavailable
from quire.kernels.cpu.tracing import empty
from quire.parallel.collectives import Collectives
from quire.types.errors import ConfigError

SLOT_BYTES = 1 << 20  # messages are cut into pieces of this size
_HEADER = 64 * 64


class SharedMemory:
    """Zeroed memory behind a file descriptor that has no name, so that nothing is left when its holders are gone."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        """With `fd` it is the memory that another process made."""
        if fd is None:
            fd = _nameless_file()
            os.ftruncate(fd, num_bytes)
        self.fd, self.num_bytes = fd, num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def words(self, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """`count` 64-bit words from byte `start` on."""
        return self.bytes[start : start + 8 * count].view(np.uint64)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with whoever still has it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire")
    with tempfile.TemporaryFile() as file:  # not Linux
        return os.dup(file.fileno())


def collective_bytes(size: int) -> int:
    return _HEADER + 2 * size * SLOT_BYTES


class SharedMemoryCollectives(Collectives):
    """Between processes; a kernel like any other, so that lists of kernel calls may hold it."""

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        reason = unavailable()
        if reason is not None:
            raise ConfigError(f"tensor_parallel_size is {size}, which needs the CPU kernels, but {reason}")
        self._memory, self._group = memory, (memory.address, rank, size, SLOT_BYTES)
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.all_reduce(x.float()).to(x.dtype)
        x = x.contiguous()
        out = empty(*x.shape)
        bound().sum_over_ranks(*self._group, x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1:].numel())
        return out

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        if x.dtype != torch.float32:
            return self.all_gather(x.float(), total).to(x.dtype)
        x = x.contiguous()
        out, share = empty(x.shape[0], total), -(-total // self._size)
        bound().gather_over_ranks(*self._group, x.data_ptr(), out.data_ptr(), *x.shape, share, total)
        return out

    def minimum(self, values: Sequence[int]) -> list[int]:
        mine = torch.tensor([list(values)], dtype=torch.int64).view(torch.float32)  # bytes that are only moved
        gathered = self.all_gather(mine, self._size * mine.shape[1]).view(torch.int64)
        return [int(value) for value in gathered.view(self._size, -1).amin(0)]


class CollectiveFailure:
    """Whether a rank has failed, so that the others wait for it no longer; what they compute is then nothing."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @property
    def is_told(self) -> bool:
        return bool(ctypes.c_uint32.from_address(self._memory.address).value)

    def tell(self) -> None:
        ctypes.c_uint32.from_address(self._memory.address).value = 1

    def forget(self) -> None:
        """Start over; while no rank is in a collective."""
        self._memory.bytes[:_HEADER] = 0
