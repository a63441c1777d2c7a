"""Moving experts between ranks: weights and table follow the load, and a failure in between ends the engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.parallel.groups import ParallelGroup
from quire.parallel.shared_memory import CollectiveFailure, SharedMemory, SharedMemoryCollectives, collective_bytes
from quire.types.errors import ConfigError, EngineDeadError
from quire.worker import rebalancing
from quire.worker.rebalancing import ExpertBalancer

WIDTH = 3001  # bytes of an expert's tensors, which are no whole numbers of float32


class Layer(nn.Module):
    """Experts whose weights are their own numbers."""

    def __init__(self, slots: list[int], rank: int, size: int, load: list[int]) -> None:
        super().__init__()
        share = len(slots) // size
        self.slots, self.load = slots, torch.tensor(load)
        self.places = self.places_of(slots)
        mine, spec = slots[rank * share : (rank + 1) * share], SimpleNamespace(count=share, path="experts")
        self.held = [[torch.full((WIDTH,), expert, dtype=torch.uint8) for expert in mine] for _ in range(2)]
        methods = [
            SimpleNamespace(tensors_of=lambda slot, held=held: [held[slot]], kept="float32", spec=spec)
            for held in self.held
        ]
        self.gate_up_proj, self.down_proj = (SimpleNamespace(method=method) for method in methods)

    def places_of(self, slots: list[int]) -> Tensor:
        return torch.tensor([slots.index(expert) for expert in range(max(slots) + 1)])


@pytest.fixture(autouse=True)
def of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancing, "Experts", Layer)


def on_two_ranks(work: Any, slots: list[int], load: list[int]) -> list[Any]:
    memory = SharedMemory(collective_bytes(2))

    def run(rank: int) -> Any:
        mine = SharedMemory(collective_bytes(2), memory.fd)
        group = ParallelGroup(rank, 2, SharedMemoryCollectives(mine, rank, 2))
        layer = Layer(list(slots), rank, 2, load)
        return work(ExpertBalancer(nn.ModuleList([layer]), group, 4), layer, rank, CollectiveFailure([mine]))

    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, range(2)))
    finally:
        memory.close()


def test_weights_and_places_follow_the_load() -> None:
    """Two busy experts on one rank are taken apart; then the same load moves nothing."""

    def work(balancer: ExpertBalancer, layer: Layer, rank: int, failure: CollectiveFailure) -> list[int]:
        for step in range(9):  # turns come at steps 4 and 8
            balancer.before_step(step)
            layer.load += torch.tensor([9, 8, 1, 1]) * (step >= 4)
        share = layer.slots[2 * rank : 2 * rank + 2]
        for held in layer.held:
            assert [weights.unique().tolist() for weights in held] == [[expert] for expert in share]
        assert torch.equal(layer.places, layer.places_of(layer.slots))
        return layer.slots

    first, second = on_two_ranks(work, [0, 1, 2, 3], [90, 80, 10, 10])
    assert first == second
    assert sorted(first) == [0, 1, 2, 3]
    assert (first.index(0) < 2) != (first.index(1) < 2)


def test_a_rank_that_fails_in_a_move_ends_the_engine() -> None:
    """The other one is told so too, or has not begun to write."""

    def work(balancer: ExpertBalancer, layer: Layer, rank: int, failure: CollectiveFailure) -> str:
        if rank == 1:
            layer.held[1].clear()  # of the second matrices, when the first have moved
        try:
            balancer.before_step(4)
        except EngineDeadError as error:
            return str(error)
        finally:
            failure.tell()  # as a rank does whose step failed
        return ""

    first, second = on_two_ranks(work, [0, 1, 2, 3], [90, 80, 10, 10])
    assert "a rank failed while experts were moved" in first
    assert "index out of range" in second


def test_nothing_moves_after_a_failed_step() -> None:
    def work(balancer: ExpertBalancer, layer: Layer, rank: int, failure: CollectiveFailure) -> list[int]:
        failure.tell()
        balancer.before_step(4)
        return layer.slots

    assert on_two_ranks(work, [0, 1, 2, 3], [90, 80, 10, 10]) == [[0, 1, 2, 3]] * 2


def test_shares_must_be_equal() -> None:
    layer = Layer([0, 1, 2], 0, 1, [1, 1, 1])
    with pytest.raises(ConfigError, match=r"equal shares, but there are 3; set --num-redundant-experts 1"):
        ExpertBalancer(nn.ModuleList([layer]), ParallelGroup(0, 2), 4)
