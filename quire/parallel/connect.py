"""How the ranks of an engine are connected."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from quire.config.groups import ParallelConfig
from quire.parallel.collectives import Collectives
from quire.parallel.groups import ContextShare, ParallelGroup
from quire.parallel.pipeline import Link, Pipeline
from quire.platform.base import Platform


class HostLinks(Protocol):
    """What connects ranks that compute on CPUs. Ranks of the first stage come first."""

    def of_stage(self, rank: int) -> Collectives:
        """Of the ranks that share this one's layers."""

    def of_context(self, rank: int) -> Collectives:
        """Of the ranks that split contexts with this one."""

    def of_all(self, rank: int) -> Collectives: ...

    def link(self, rank: int) -> Link:
        """To the ranks in its place of the stages before and after it."""


def connect(
    platform: Platform, links: HostLinks, rank: int, parallel: ParallelConfig, meeting: str
) -> tuple[ParallelGroup, Pipeline]:
    """The group of this rank and its place among the stages.

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
