"""Memory that processes on one host share, and the CPU's collectives through it. See kernels/cpu/collectives.cpp."""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import abstractmethod
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu.experts import add_slots
from quire.kernels.cpu.library import bound, unavailable
from quire.kernels.cpu.tracing import empty
from quire.parallel.collectives import Collectives, NullCollectives
from quire.parallel.pipeline import Link
from quire.parallel.replica_links import nameless_file
from quire.types.errors import ConfigError

SLOT_BYTES = 1 << 20  # messages are cut into pieces of this size
LINK_SLOTS = 32  # of a link between two stages; a small message takes one
_HEADER = 64 * 64


class SharedMemory:
    """Zeroed memory behind a file descriptor that has no name, so that nothing is left when its holders are gone."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        """With `fd` it is the memory that another process made."""
        if fd is None:
            fd = nameless_file()
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

    def part(self, start: int, num_bytes: int) -> MemoryPart:
        return MemoryPart(self, self.bytes[start : start + num_bytes])

    def close(self) -> None:
        """Give the descriptor back; the memory goes with whoever still has it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MemoryPart:
    """A part of shared memory that a group of ranks has for itself."""

    def __init__(self, memory: SharedMemory, part: NDArray[np.uint8]) -> None:
        self._memory, self.bytes = memory, part

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


def collective_bytes(size: int) -> int:
    return _HEADER + 2 * size * SLOT_BYTES


LINK_BYTES = _HEADER + LINK_SLOTS * SLOT_BYTES


class RankMemory:
    """The memory of all ranks, by stages: what all share, the ranks of each stage, and links between neighbours.

    Behind it is that of ranks that split contexts, `context_size` neighbours each.

    Ranks count through the first stage, then through the second; `tensor_size` of them share every layer.
    """

    def __init__(self, tensor_size: int, stages: int, context_size: int = 1, fd: int | None = None) -> None:
        """With `fd` it is the memory that another process made."""
        self._world, self._stage = collective_bytes(tensor_size * stages), collective_bytes(tensor_size)
        self._tensor_size, self._stages, self._num_ranks = tensor_size, stages, tensor_size * stages
        self._links = self._world + stages * self._stage
        self._contexts, self._context_size = self._links + self._num_ranks * LINK_BYTES, context_size
        self._num_contexts = tensor_size * stages // context_size if context_size > 1 else 0
        self.memory = SharedMemory(self._contexts + self._num_contexts * collective_bytes(context_size), fd)

    @property
    def fd(self) -> int:
        return self.memory.fd

    @property
    def world(self) -> MemoryPart:
        return self.memory.part(0, self._world)

    def stage(self, index: int) -> MemoryPart:
        return self.memory.part(self._world + index * self._stage, self._stage)

    def context(self, index: int) -> MemoryPart:
        size = collective_bytes(self._context_size)
        return self.memory.part(self._contexts + index * size, size)

    def link_from(self, rank: int) -> MemoryPart:
        """From a rank to the one in its place of the next stage, which of the last one is the first."""
        return self.memory.part(self._links + rank % self._num_ranks * LINK_BYTES, LINK_BYTES)

    def parts(self) -> list[MemoryPart]:
        links = map(self.link_from, range(self._num_ranks))
        stages = (self.stage(index) for index in range(self._stages))
        contexts = map(self.context, range(self._num_contexts))
        return [self.world, *stages, *links, *contexts]

    def of_stage(self, rank: int) -> Collectives:
        stage, place = divmod(rank, self._tensor_size)
        return _through(self.stage(stage), place, self._tensor_size)

    def of_context(self, rank: int) -> Collectives:
        index, place = divmod(rank, self._context_size)
        return _through(self.context(index), place, self._context_size)

    def of_all(self, rank: int) -> Collectives:
        return _through(self.world, rank, self._tensor_size * self._stages)

    def link(self, rank: int) -> Link:
        return SharedMemoryLink(self.link_from(rank - self._tensor_size), self.link_from(rank))

    def close(self) -> None:
        self.memory.close()


def _through(part: MemoryPart, rank: int, size: int) -> Collectives:
    return NullCollectives() if size == 1 else SharedMemoryCollectives(part, rank, size)


class CpuCollectives(Collectives):
    """Of processes that compute on CPUs, by kernels like any other, so that lists of kernel calls may hold them."""

    def __init__(self, rank: int, size: int) -> None:
        reason = unavailable()
        if reason is not None:
            raise ConfigError(f"{size} ranks on a CPU need the CPU kernels, but {reason}")
        self._rank, self._size = rank, size

    @abstractmethod
    def _call(self, kernel: str, x: Tensor, *arguments: int) -> None:
        """A kernel of these ranks: kernel_over_ranks, kernel_over_sockets. x: float32, contiguous."""

    def _out(self, kernel: str, x: Tensor, shape: Sequence[int], *sizes: int, between: Sequence[int] = ()) -> Tensor:
        """What a kernel leaves in a tensor of this shape. Other types are moved and added up as float32."""
        wide, out = x.float().contiguous(), empty(*shape)
        self._call(kernel, wide, *between, out.data_ptr(), *sizes)
        return out.to(x.dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._out("sum", x, x.shape, x.shape[0], x.shape[1:].numel())

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        return self._out("gather", x, (x.shape[0], total), *x.shape, -(-total // self._size), total)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        count, *line = x.shape
        share = -(-count // self._size)
        return self._out("scatter_rows", x, (share, *line), count, share, prod(line))

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        share, *line = x.shape
        return self._out("gather_rows", x, (total, *line), total, share, prod(line))

    def own_rows(self, x: Tensor) -> Tensor:
        count, *line = x.shape
        share = -(-count // self._size)
        wide, out = x.float().contiguous(), empty(share, *line)
        bound().own_rows(self._rank, self._size, wide.data_ptr(), out.data_ptr(), count, share, prod(line))
        return out.to(x.dtype)

    def sum_by_shares(self, x: Tensor) -> Tensor:
        sizes = x.shape[0], 0, x.shape[1:].numel()  # kernels find the share, so that lists hold any number of rows
        return self._out("gather_rows", self._out("scatter_rows", x, x.shape, *sizes), x.shape, *sizes)

    def add_slots(self, slots: Tensor, weights: Tensor) -> Tensor:
        """slots [n, k, width], each of one rank and 0 in the others -> weighted sums in slot order [n, width].

        A rank gets its share of the rows by a reduce-scatter and adds up their slots; all get the sums.
        """
        (count, k, width), mine = slots.shape, empty(*weights.shape)
        weights = weights.contiguous()
        bound().own_rows(self._rank, self._size, weights.data_ptr(), mine.data_ptr(), count, 0, k)
        sums = add_slots(self._out("scatter_rows", slots, slots.shape, count, 0, k * width), mine, 0, 1)
        return self._out("gather_rows", sums, sums.shape, count, 0, width)

    def exchange(self, x: Tensor, routes: Tensor) -> Tensor:
        if x.shape[-1] * 4 > SLOT_BYTES:
            raise ConfigError(f"rows of {x.shape[-1]} values are too wide to be sent; leave --all2all-backend out")
        routes, size = routes.contiguous(), (x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
        return self._out("rows", x, x.shape, *size, between=[routes.data_ptr()])

    def minimum(self, values: Sequence[int]) -> list[int]:
        mine = torch.tensor([list(values)], dtype=torch.int64).view(torch.float32)  # bytes that are only moved
        gathered = self.all_gather(mine, self._size * mine.shape[1]).view(torch.int64)
        return [int(value) for value in gathered.view(self._size, -1).amin(0)]


class SharedMemoryCollectives(CpuCollectives):
    """Between processes of one host."""

    def __init__(self, memory: SharedMemory | MemoryPart, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._memory, self._group = memory, (memory.address, rank, size, SLOT_BYTES)

    def _call(self, kernel: str, x: Tensor, *arguments: int) -> None:
        getattr(bound(), f"{kernel}_over_ranks")(*self._group, x.data_ptr(), *arguments)

    @property
    def is_broken(self) -> bool:
        return CollectiveFailure([self._memory]).is_told


class SharedMemoryLink(Link):
    """Between processes. Sends are not a part of kernel lists, which begin and end with tensors at fixed places."""

    def __init__(self, before: MemoryPart, after: MemoryPart) -> None:
        self._before, self._after = before, after

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        bound().send_to_stage(self._after.address, LINK_SLOTS, SLOT_BYTES, x.data_ptr(), x.nbytes)

    def receive(self, out: Tensor) -> bool:
        bound().receive_from_stage(self._before.address, LINK_SLOTS, SLOT_BYTES, out.data_ptr(), out.nbytes)
        return not CollectiveFailure([self._before]).is_told


class CollectiveFailure:
    """Whether a rank has failed, so that the others wait for it no longer; what they compute is then nothing."""

    def __init__(self, parts: Sequence[SharedMemory | MemoryPart]) -> None:
        """`parts`: in each of which ranks may wait."""
        self._parts = parts

    @property
    def is_told(self) -> bool:
        return bool(ctypes.c_uint32.from_address(self._parts[0].address).value)

    def tell(self) -> None:
        for part in self._parts:
            ctypes.c_uint32.from_address(part.address).value = 1

    def forget(self) -> None:
        """Start over; while no rank is in a collective."""
        for part in self._parts:
            part.bytes[:_HEADER] = 0
