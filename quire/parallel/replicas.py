"""Replicas that share experts: processes of one host that each hold some of every layer's, for the tokens of all.

A step passes the layers with experts one after the other, and in each of them every replica has to take part. So the
first layer of a step rings the others: who has a step of its own next takes part by it, and who has none with no
tokens. Nobody says beforehand whether it has a step, and where none runs, all sleep.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch
from torch import Tensor

from quire.config.env import replica_links
from quire.parallel.shared_memory import CollectiveFailure, SharedMemory, SharedMemoryCollectives, collective_bytes
from quire.types.errors import ConfigError, EngineDeadError


class ReplicaCollectives(SharedMemoryCollectives):
    def __init__(self, size: int) -> None:
        """Of this process, which was launched as one of `size`."""
        if len(given := replica_links()) != 2 + 2 * size:
            raise ConfigError(f"data_parallel_size is {size}, but this is one engine; `quire serve` runs several")
        self.rank, fd, *self._pipes = given
        os.ftruncate(fd, num_bytes := collective_bytes(size) + 8 * size)  # as the others do
        memory = SharedMemory(num_bytes, fd)
        super().__init__(memory, self.rank, size)
        self.fail = CollectiveFailure([memory]).tell
        self._begun = memory.words(collective_bytes(size), size)  # passes, of each replica

    @property
    def is_behind(self) -> bool:
        """Whether another replica has begun a pass that this one has not."""
        return bool(self._begun.max() > self._begun[self.rank])

    def begin(self) -> None:
        """Begin a pass, and wake all others."""
        self._begun[self.rank] += 1
        for rank, end in enumerate(self._pipes[1::2]):
            if rank != self.rank:
                os.set_blocking(end, False)
                with suppress(BlockingIOError):  # it has been told often enough
                    os.write(end, b"\0")

    def wait(self) -> None:
        """Sleep until another replica has begun a pass."""
        os.read(self._pipes[2 * self.rank], 1 << 16)

    def agree(self, count: int, layer: int) -> list[int]:
        """The number of tokens that each replica has in a layer of this pass."""
        told = self.gather_rows(torch.tensor([[count, layer]], dtype=torch.float32), self._size)
        if bool((told[:, 1] != layer).any()):
            raise EngineDeadError("replicas that share experts are in different layers; this is a bug in Quire")
        return [int(number) for number in told[:, 0]]

    def _call(self, kernel: str, x: Tensor, *arguments: int) -> None:
        super()._call(kernel, x, *arguments)
        if self.is_broken:  # what was exchanged may be anything
            raise EngineDeadError("a replica that holds some of the experts has failed")
