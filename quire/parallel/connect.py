"""How the ranks of an engine are connected."""

from __future__ import annotations

from dataclasses import replace

from quire.config.groups import ParallelConfig
from quire.parallel.collectives import NullCollectives
from quire.parallel.groups import ContextShare, ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.parallel.replicas import ReplicaCollectives
from quire.parallel.shared_memory import RankMemory
from quire.parallel.sockets import Mesh
from quire.platform.base import Platform


def connect(
    platform: Platform, links: RankMemory | Mesh, rank: int, parallel: ParallelConfig, meeting: str
) -> tuple[ParallelGroup, Pipeline]:
    """The group of this rank and its place among the stages, of which the first has the first ranks.

    `links` connect ranks on CPUs; a link of theirs is to the ranks in its place of the stages before and after it.
    At `meeting`, a file that does not exist yet or tcp://ADDRESS:PORT, ranks on GPUs find each other.
    """
    size, stages, contexts = parallel.sizes
    context = ContextShare(rank % contexts, contexts)
    if platform.uses_host_memory:
        of_stage, world, link = links.of_stage(rank), links.of_all(rank), links.link(rank)
        context = replace(context, collectives=links.of_context(rank))
    else:
        from quire.parallel.nccl import NcclLink, nccl_collectives

        of_stage, world = nccl_collectives(platform.device, rank, size, stages, meeting)
        link = NcclLink(rank, size, stages)
    group = ParallelGroup(rank % size, size, of_stage, context=context, **parallel.group_settings)
    return group, Pipeline(rank // size, stages, None, link, world)


def replica_group(parallel: ParallelConfig, ranks: ReplicaCollectives | None = None) -> ParallelGroup:
    """Of a replica that shares nothing but experts; without `ranks` it is the first one, to be planned alone."""
    rank, all_ranks = (0, NullCollectives()) if ranks is None else (ranks.rank, ranks)
    replicas = ParallelGroup(
        rank, parallel.data_parallel_size, all_ranks, splits_experts=True, expert_exchange="replicas"
    )
    return ParallelGroup(**parallel.group_settings, replicas=replicas)
