"""Where experts go: which slots of which ranks hold each one, by how often it is used. Knows numbers only.

Slots are numbered over all ranks, each of which has the same number of them; tokens are shared evenly by the copies
of their expert.

How good it is: copies are sorted by load and dealt out in rounds, one to each rank. Whoever gets which copy of a
round, two ranks then differ by at most the sum over the rounds of (largest - smallest copy of the round). Rounds are
sorted, so that sum is at most (largest - smallest copy of all). The busiest rank has at most that much more than the
mean, which no placement of the same copies can be below. Within a round the largest copy goes to the least busy
rank, which is mostly far better than the bound. The numbers of copies are the best there are: the next one always
goes to the expert with the largest load a copy, so that the largest copy is as small as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def count_copies(loads: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """How many slots each expert gets: at least one, at most one a rank."""
    copies = [1] * len(loads)
    heap: list[tuple[float, int]] = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(num_slots - len(loads)):
        expert = heap[0][1]
        copies[expert] += 1
        left = -loads[expert] / copies[expert] if copies[expert] < num_ranks else 1.0  # after all others
        heapreplace(heap, (left, expert))
    return copies


def place_experts(loads: Sequence[int], num_slots: int, num_ranks: int, before: Sequence[int] = ()) -> list[int]:
    """The expert of each slot. `before`: the placement that there was, of which as much as possible stays in place.

    `num_slots` is a multiple of the ranks, and at most one for each expert and rank. No rank has an expert twice.
    """
    copies = count_copies(loads, num_slots, num_ranks)
    dealt = sorted(
        (
            (-load / count, expert)
            for expert, (load, count) in enumerate(zip(loads, copies, strict=True))
            for _ in range(count)
        )
    )
    groups: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for first in range(0, num_slots, num_ranks):
        open_ranks = set(range(num_ranks))
        # Copies that an earlier round began come first here, when every rank without one is open.
        for load, expert in dealt[first : first + num_ranks]:
            rank = min(
                (rank for rank in open_ranks if expert not in groups[rank]), key=lambda rank: (sums[rank], rank)
            )
            open_ranks.remove(rank)
            groups[rank].append(expert)
            sums[rank] -= load
    return _kept_in_place(groups, before) if before else [expert for group in groups for expert in group]


def rank_loads(loads: Sequence[int], slots: Sequence[int], num_ranks: int) -> list[float]:
    """What each rank has to compute under a placement."""
    share = len(slots) // num_ranks
    copies = [slots.count(expert) for expert in range(len(loads))]
    return [
        sum(loads[expert] / copies[expert] for expert in slots[rank * share : (rank + 1) * share])
        for rank in range(num_ranks)
    ]


def sources_of(before: Sequence[int], after: Sequence[int], num_ranks: int) -> dict[int, int]:
    """For each slot that gets another expert, a slot that has had it; of the same rank, if there is one."""
    share, found = len(before) // num_ranks, {}
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            holders = [other for other, expert in enumerate(before) if expert == new]
            found[slot] = min(holders, key=lambda other: (other // share != slot // share, other))
    return found


def _kept_in_place(groups: list[list[int]], before: Sequence[int]) -> list[int]:
    """Ranks are alike: each gets the group that it has most of already, and that in its old slots."""
    share, size = len(groups[0]), len(groups)
    held = [before[rank * share : (rank + 1) * share] for rank in range(size)]
    pairs = sorted(
        (-len({*groups[group]} & {*held[rank]}), rank, group) for rank in range(size) for group in range(size)
    )
    given: dict[int, int] = {}
    for _, rank, group in pairs:
        if rank not in given and group not in given.values():
            given[rank] = group
    placed: list[int] = []
    for rank in range(size):
        wanted = groups[given[rank]]
        new = iter(expert for expert in wanted if expert not in held[rank])
        placed += [expert if expert in wanted else next(new) for expert in held[rank]]
    return placed
