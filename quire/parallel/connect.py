"""How the ranks of a group are connected."""

from __future__ import annotations

from quire.parallel.collectives import Collectives, NullCollectives
from quire.parallel.shared_memory import SharedMemory, SharedMemoryCollectives
from quire.platform.base import Platform


def connect(platform: Platform, memory: SharedMemory, rank: int, size: int, meeting: str) -> Collectives:
    """Collectives of this rank: of the host's memory or of GPUs.

    `memory` is shared by all ranks; at `meeting`, a file that does not exist yet, those on GPUs find each other.
    """
    if size == 1:
        return NullCollectives()
    if platform.uses_host_memory:
        return SharedMemoryCollectives(memory, rank, size)
    from quire.parallel.nccl import NcclCollectives

    return NcclCollectives(platform.device, rank, size, meeting)
