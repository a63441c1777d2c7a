"""How what experts give each token by itself comes together, so that it is added up as one rank does it.

Ranks of one step have routed every token, so all know all routes, and nothing is said about sizes: tensors keep the
shape of the step, in which a rank reads and writes the rows that concern it. Replicas tell each other what they have.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.cpu.experts import add_slots, expert_routes
from quire.parallel.groups import ParallelGroup
from quire.parallel.replicas import ReplicaCollectives
from quire.parallel.shared_memory import CpuCollectives

Back = tuple[Tensor, ...]
"""The ways of results to the ranks that add them up."""
Dispatched = tuple[Tensor, Tensor, Tensor, Back]
"""Tokens that may have experts here [n, h], their experts and weights [n, k], others' being any but 0; and Back."""


class SlotShares:
    """By reduce-scatter: every rank has every token, and adds up the results of its share of them for all."""

    def __init__(self, group: ParallelGroup, share: int) -> None:
        """Each rank has `share` slots of experts; see ops/routing.py."""
        self._group, self._share = group, share

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor, places: Tensor) -> Dispatched:
        """x [n, h] with the tokens that this rank owns -> those with experts here."""
        return x, expert_ids, weights, ()

    def combine(self, given: Tensor, weights: Tensor, back: Back) -> Tensor:
        """What experts here gave, [n, k, h], zeros for others -> sums of all tokens [n, h], added in slot order."""
        assert isinstance(self._group.collectives, CpuCollectives), "exact sums are of a CPU"
        return self._group.collectives.add_slots(given, weights)


class AllToAll(SlotShares):
    """Token i of a step is owned by rank i % size, which sends it to its experts and adds up their results."""

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor, places: Tensor) -> Dispatched:
        there, *back = expert_routes(expert_ids, places, self._share, self._group.size)
        return self._group.collectives.exchange(x, there), expert_ids, weights, (*back,)

    def combine(self, given: Tensor, weights: Tensor, back: Back) -> Tensor:
        group = self._group
        mine = group.collectives.exchange(given, back[0])
        return group.collectives.exchange(add_slots(mine.float(), weights, group.rank, group.size), back[1])


class BetweenReplicas(SlotShares):
    """Each has tokens of its own, any number of them or none, and adds up the results of those.

    They tell each other how many and for which experts; a token then goes where its experts are, and to no other.
    """

    layer = 0  # of those with experts; the first begins a pass

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor, places: Tensor) -> Dispatched:
        ranks, size = self._group.collectives, self._group.size
        assert isinstance(ranks, ReplicaCollectives), "this process is no replica"
        if self.layer == 0:
            ranks.begin()
        counts = ranks.agree(x.shape[0], self.layer)
        (count, k), most = expert_ids.shape, max(counts)
        padded = expert_ids.new_zeros(most, k)
        padded[:count] = expert_ids
        told = ranks.gather_rows(padded, size * most).view(size, most, k)
        ids = torch.cat([part[:num] for part, num in zip(told, counts, strict=True)])
        owners = torch.repeat_interleave(torch.arange(size), torch.tensor(counts))
        holders = places[ids.long(), 0].long() // self._share
        readers = reduce(torch.bitwise_or, (1 << holders).unbind(1))
        back = torch.stack([holders, (1 << owners).unsqueeze(1).expand_as(holders)], 2)
        start = [0, *accumulate(counts)][self._group.rank]
        mine = torch.arange(start, start + count)
        there = x.new_empty(len(ids), x.shape[1])
        there[mine] = x
        here = ranks.exchange(there, torch.stack([owners, readers], 1))
        return here, ids, torch.ones(ids.shape), (back, mine)

    def combine(self, given: Tensor, weights: Tensor, back: Back) -> Tensor:
        slots = self._group.collectives.exchange(given, back[0])[back[1]]
        return add_slots(slots.float(), weights, 0, 1)


EXCHANGES: dict[str, type[SlotShares]] = {"all_to_all": AllToAll, "replicas": BetweenReplicas}
