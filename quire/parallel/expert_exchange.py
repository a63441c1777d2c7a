"""Dispatch and combine by all-to-all: tokens go to the ranks that hold their experts, and what these give comes back.

Token i of a step is owned by rank i % size. Every rank has routed every token, so all know all routes, and nothing is
said about sizes: tensors keep the shape of the step, in which a rank reads and writes the rows that concern it.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.experts import add_slots, expert_routes
from quire.parallel.groups import ParallelGroup


class ExpertExchange:
    def __init__(self, group: ParallelGroup, share: int) -> None:
        """Each rank has `share` slots; see ops/routing.py."""
        self._group, self._share = group, share

    def dispatch(self, x: Tensor, expert_ids: Tensor, places: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [n, h] with the tokens that this rank owns -> those with experts here, and the ways back of results."""
        there, *back = expert_routes(expert_ids, places, self._share, self._group.size)
        return self._group.collectives.exchange(x, there), (back[0], back[1])

    def combine(self, given: Tensor, weights: Tensor, back: tuple[Tensor, Tensor]) -> Tensor:
        """What experts here gave, [n, k, h] -> sums of all tokens [n, h], each added by its owner in slot order."""
        group = self._group
        mine = group.collectives.exchange(given, back[0])
        return group.collectives.exchange(add_slots(mine.float(), weights, group.rank, group.size), back[1])
