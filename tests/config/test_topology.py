"""The topology that is chosen fits whenever any does, and has the fewest ranks; for any model and machine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.topology import Outcome, candidates, choose_topology
from quire.types.errors import ConfigError, MemoryPlanError


@dataclass(frozen=True)
class FakePlan:
    """A model with so many heads and layers, whose weights and requests ranks share."""

    heads: int
    layers: int
    weights: int
    fixed: int  # of each rank
    trained: int  # tokens, each of them a byte of KV
    memory: int  # of a card
    takes_stages: bool

    def __call__(self, tensor: int, stages: int) -> Outcome:
        if self.heads % tensor:
            raise ConfigError(f"{self.heads} heads cannot be split over {tensor} ranks")
        if stages > (self.layers if self.takes_stages else 1):
            raise ConfigError(f"{self.layers} layers are no {stages} stages")
        largest = -(-self.layers // stages)  # the stage with most layers decides
        per_layer = -(-self.weights // (self.layers * tensor))
        left = self.memory - self.fixed - largest * per_layer
        length = min(self.trained, left * self.layers * tensor // largest)
        if length < 1:
            raise MemoryPlanError(f"not enough memory: {-left} bytes are missing\na table")
        return Outcome(length, length == self.trained)


plans = st.builds(
    FakePlan,
    heads=st.sampled_from([1, 2, 6, 8, 12, 32, 40]),
    layers=st.integers(1, 12),
    weights=st.integers(1, 2000),
    fixed=st.integers(0, 40),
    trained=st.integers(1, 400),
    memory=st.integers(1, 400),
    takes_stages=st.booleans(),
)


@given(plan=plans, cards=st.integers(1, 9), hosts=st.integers(1, 3), most=st.none() | st.integers(1, 3))
def test_of_all_topologies_the_first_that_holds_full_requests(
    plan: FakePlan, cards: int, hosts: int, most: int | None
) -> None:
    possible: dict[tuple[int, int], Outcome] = {}
    refused = 0
    for tensor in range(1, cards + 1):
        for stages in range(1, cards * hosts // tensor + 1):
            if hosts > 1 and cards % tensor:
                continue
            try:
                possible[tensor, stages] = plan(tensor, stages)
            except MemoryPlanError:
                refused += 1
            except ConfigError:
                continue
    if not possible:
        assert refused  # one rank is always allowed
        with pytest.raises(MemoryPlanError, match="no topology of up to"):
            choose_topology(plan, cards, hosts)
        return
    found = choose_topology(plan, cards, hosts, most_replicas=most)
    outcome = possible[found.tensor, found.stages]
    assert plan.heads % found.tensor == 0
    assert found.tensor <= cards
    whole = [tensor * stages for (tensor, stages), one in possible.items() if one.is_whole]
    if whole:
        assert outcome.is_whole
        assert found.num_ranks == min(whole)
        same = [
            tensor for (tensor, stages), one in possible.items() if one.is_whole and tensor * stages == min(whole)
        ]
        assert found.tensor == max(same)
    else:
        longest = max(one.length for one in possible.values())
        assert outcome.length == longest
        assert found.num_ranks == min(t * s for (t, s), one in possible.items() if one.length == longest)
    replicas = cards * hosts // found.num_ranks
    assert found.replicas == (replicas if most is None else min(most, replicas))
    assert str(outcome.length) in found.reason


def test_candidates_come_by_ranks_and_stay_within_hosts() -> None:
    assert list(candidates(4))[:6] == [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1)]
    assert (3, 1) not in list(candidates(4, 2))
    assert {tensor for tensor, _ in candidates(4, 2)} == {1, 2, 4}
    assert (4, 2) in list(candidates(4, 2))


def test_the_reason_names_what_did_not_do() -> None:
    plan = FakePlan(heads=8, layers=4, weights=400, fixed=0, trained=100, memory=220, takes_stages=True)
    found = choose_topology(plan, 8)
    assert (found.tensor, found.stages, found.replicas) == (4, 1, 2)
    assert found.reason.startswith("4 ranks are the fewest that hold the model and a request of 100 tokens")
    assert "-tp 1 -pp 1: not enough memory: 180 bytes are missing" in found.reason
    assert "-tp 2 -pp 1: requests of 40 tokens" in found.reason
    assert found.reason.endswith("2 of them on 8 cards")


def test_a_model_that_no_rank_can_run_is_refused_with_the_first_cause() -> None:
    def plan(tensor: int, stages: int) -> Outcome:
        raise ConfigError(f"what -tp {tensor} -pp {stages} lacks")

    with pytest.raises(ConfigError, match="what -tp 1 -pp 1 lacks"):
        choose_topology(plan, 2)
