"""How the ranks of an engine are connected."""

from __future__ import annotations

from quire.parallel.collectives import Collectives, NullCollectives
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.parallel.shared_memory import MemoryPart, RankMemory, SharedMemoryCollectives, SharedMemoryLink
from quire.platform.base import Platform


def connect(
    platform: Platform,
    memory: RankMemory,
    rank: int,
    tensor_size: int,
    stages: int,
    meeting: str,
    *,
    exact: bool = False,
    splits_experts: bool = False,
) -> tuple[ParallelGroup, Pipeline]:
    """The group of this rank, of `tensor_size` that share its layers, and its place among the stages.

    Ranks of the first stage come first. `memory` is shared by all; at `meeting`, a file that does not exist yet,
    those on GPUs find each other. `exact` and `splits_experts`: see ParallelGroup.
    """
    stage, place = divmod(rank, tensor_size)
    if platform.uses_host_memory:
        of_stage = _through(memory.stage(stage), place, tensor_size)
        world = _through(memory.world, rank, tensor_size * stages)
        link = SharedMemoryLink(memory.link_from(rank - tensor_size), memory.link_from(rank))
        group = ParallelGroup(place, tensor_size, of_stage, exact, splits_experts)
        return group, Pipeline(stage, stages, None, link, world)
    from quire.parallel.nccl import NcclLink, nccl_collectives

    of_stage, world = nccl_collectives(platform.device, rank, tensor_size, stages, meeting)
    group = ParallelGroup(place, tensor_size, of_stage, exact, splits_experts)
    return group, Pipeline(stage, stages, None, NcclLink(rank, tensor_size, stages), world)


def _through(part: MemoryPart, rank: int, size: int) -> Collectives:
    return NullCollectives() if size == 1 else SharedMemoryCollectives(part, rank, size)
