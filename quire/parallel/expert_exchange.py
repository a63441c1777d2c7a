"""How what experts give each token by itself comes together, so that it is added up as one rank does it.

Every rank has routed every token, so all know all routes, and nothing is said about sizes: tensors keep the shape of
the step, in which a rank reads and writes the rows that concern it.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.experts import add_slots, expert_routes
from quire.parallel.groups import ParallelGroup
from quire.parallel.shared_memory import CpuCollectives

Back = tuple[Tensor, ...]
"""The ways of results to the ranks that add them up."""


class SlotShares:
    """By reduce-scatter: every rank has every token, and adds up the results of its share of them for all."""

    def __init__(self, group: ParallelGroup, share: int) -> None:
        """Each rank has `share` slots of experts; see ops/routing.py."""
        self._group, self._share = group, share

    def dispatch(self, x: Tensor, expert_ids: Tensor, places: Tensor) -> tuple[Tensor, Back]:
        """x [n, h] with the tokens that this rank owns -> those with experts here."""
        return x, ()

    def combine(self, given: Tensor, weights: Tensor, back: Back) -> Tensor:
        """What experts here gave, [n, k, h], zeros for others -> sums of all tokens [n, h], added in slot order."""
        assert isinstance(self._group.collectives, CpuCollectives), "exact sums are of a CPU"
        return self._group.collectives.add_slots(given, weights)


class AllToAll(SlotShares):
    """Token i of a step is owned by rank i % size, which sends it to its experts and adds up their results."""

    def dispatch(self, x: Tensor, expert_ids: Tensor, places: Tensor) -> tuple[Tensor, Back]:
        there, *back = expert_routes(expert_ids, places, self._share, self._group.size)
        return self._group.collectives.exchange(x, there), (*back,)

    def combine(self, given: Tensor, weights: Tensor, back: Back) -> Tensor:
        group = self._group
        mine = group.collectives.exchange(given, back[0])
        return group.collectives.exchange(add_slots(mine.float(), weights, group.rank, group.size), back[1])
