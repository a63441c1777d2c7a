"""How a model is laid over cards: the fewest ranks that hold it, then replicas. A pure function over memory plans.

Knows numbers of cards and what a plan says of each topology, not what a plan is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from quire.config.engine import MAX_RANKS
from quire.types.errors import ConfigError, MemoryPlanError


class Outcome(msgspec.Struct, frozen=True):
    """What the ledgers of a topology's ranks say."""

    length: int  # tokens of the longest request; 0: it does not fit at all
    is_whole: bool  # there is no longer request than this
    reason: str = ""  # why it does not fit


class Tried(msgspec.Struct, frozen=True):
    tensor: int
    stages: int
    outcome: Outcome


class Topology(msgspec.Struct, frozen=True):
    tensor: int = 1
    stages: int = 1
    replicas: int = 1
    reason: str = ""
    """In words, with what was tried and did not do."""

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.stages

    def __str__(self) -> str:
        return f"-tp {self.tensor} -pp {self.stages} -dp {self.replicas}"


Plan = Callable[[int, int], Outcome]
"""Of tensor parallel ranks and stages; ConfigError if the model or the settings do not allow them."""


def candidates(cards: int, hosts: int = 1) -> Iterator[tuple[int, int]]:
    """(tensor parallel ranks, stages), fewest ranks first, of equally many the one with most tensor parallel ranks.

    A tensor parallel group stays within a host.
    """
    for ranks in range(1, min(cards * hosts, MAX_RANKS) + 1):
        for tensor in range(min(ranks, cards), 0, -1):
            if ranks % tensor == 0 and (hosts == 1 or cards % tensor == 0):
                yield tensor, ranks // tensor


def choose_topology(plan: Plan, cards: int, hosts: int = 1, *, most_replicas: int | None = None) -> Topology:
    """The fewest ranks with whose memory a request of full length fits; replicas fill the cards that are left.

    Where full length fits nowhere, it is the topology with the longest requests. MemoryPlanError if nothing fits.
    """
    tried: list[Tried] = []
    refusals: list[ConfigError] = []
    no_tensor: set[int] = set()
    no_stages: set[int] = set()
    for tensor, stages in candidates(cards, hosts):
        if tensor in no_tensor or stages in no_stages:
            continue
        try:
            outcome = plan(tensor, stages)
        except MemoryPlanError as error:
            outcome = Outcome(0, False, str(error).partition("\n")[0])
        except ConfigError as error:
            refusals.append(error)
            if stages == 1 and tensor > 1:
                no_tensor.add(tensor)
            if tensor == 1 and stages > 1:
                no_stages.add(stages)
            continue
        tried.append(Tried(tensor, stages, outcome))
        if outcome.is_whole:
            break
    if not tried:
        raise refusals[0]
    best = max(tried, key=lambda one: (one.outcome.is_whole, one.outcome.length))  # the first of equal ones
    if best.outcome.length == 0:
        raise MemoryPlanError(
            f"no topology of up to {cards * hosts} cards holds the model: {tried[-1].outcome.reason}"
        )
    replicas = cards * hosts // (best.tensor * best.stages)
    if most_replicas is not None:
        replicas = min(replicas, most_replicas)
    return Topology(best.tensor, best.stages, replicas, _explained(best, tried, replicas, cards * hosts))


def _explained(best: Tried, tried: Sequence[Tried], replicas: int, total: int) -> str:
    ranks, length = best.tensor * best.stages, best.outcome.length
    who = "1 rank holds" if ranks == 1 else f"{ranks} ranks are the fewest that hold"
    if best.outcome.is_whole:
        parts = [f"{who} the model and a request of {length} tokens"]
    else:
        parts = [f"{ranks} {'rank holds' if ranks == 1 else 'ranks hold'} the longest request, of {length} tokens"]
    for one in tried:
        if one is not best and one.outcome.length < length:
            short = f"requests of {one.outcome.length} tokens"
            fits = short if one.outcome.length else one.outcome.reason.partition(";")[0]  # without the fixes
            parts.append(f"-tp {one.tensor} -pp {one.stages}: {fits}")
    left = total - replicas * ranks
    if total > 1:
        parts.append(f"{replicas} of them on {total} cards" + (f", {left} unused" if left else ""))
    return "; ".join(parts)
