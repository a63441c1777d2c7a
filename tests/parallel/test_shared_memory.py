"""Collectives through shared memory: sums in a fixed order, gathered columns, and an end of waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.grouped import LOCAL_EXPERTS
from quire.parallel.shared_memory import (
    LINK_BYTES,
    LINK_SLOTS,
    SLOT_BYTES,
    CollectiveFailure,
    SharedMemory,
    SharedMemoryCollectives,
    SharedMemoryLink,
    collective_bytes,
)


def on_ranks(size: int, work: Callable[[SharedMemoryCollectives, int], object]) -> list[object]:
    """Ranks in threads, each with its own mapping of the memory, as processes have."""
    memory = SharedMemory(collective_bytes(size))

    def run(rank: int) -> object:
        mine = SharedMemory(collective_bytes(size), memory.fd)
        return work(SharedMemoryCollectives(mine, rank, size), rank)

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))
    finally:
        memory.close()


def parts(size: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


def tree(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (SLOT_BYTES // 4 // 64 + 1, 128)])
def test_sums_are_a_tree_over_the_ranks(size: int, shape: tuple[int, int]) -> None:
    mine = parts(size, *shape)
    for found in on_ranks(size, lambda group, rank: [group.all_reduce(mine[rank]) for _ in range(3)][-1]):
        assert isinstance(found, Tensor)
        assert torch.equal(found, tree(mine))


@pytest.mark.parametrize(("size", "total"), [(2, 199), (3, 10), (4, SLOT_BYTES // 2)])
def test_columns_are_gathered_in_rank_order(size: int, total: int) -> None:
    whole, share = torch.randn(3, total, generator=torch.Generator().manual_seed(0)), -(-total // size)

    def gather(group: SharedMemoryCollectives, rank: int) -> Tensor:
        return group.all_gather(whole[:, rank * share : (rank + 1) * share], total)

    for found in on_ranks(size, gather):
        assert isinstance(found, Tensor)
        assert torch.equal(found, whole)


def test_half_precision_is_summed_in_float32() -> None:
    mine = [part.bfloat16() for part in parts(2, 4, 8)]
    for found in on_ranks(2, lambda group, rank: group.all_reduce(mine[rank])):
        assert isinstance(found, Tensor)
        assert torch.equal(found, (mine[0].float() + mine[1].float()).bfloat16())


def test_the_least_of_large_numbers_is_exact() -> None:
    values = [[5, (1 << 60) + 1], [7, 1 << 60], [6, 1 << 62]]
    assert on_ranks(3, lambda group, rank: group.minimum(values[rank])) == [[5, 1 << 60]] * 3


def test_a_link_hands_on_messages_of_any_size_in_their_order() -> None:
    """More than its slots hold, so that the sender waits, and the bits of what is not finite too."""
    memory = SharedMemory(LINK_BYTES)
    part = memory.part(0, LINK_BYTES)
    sent = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 37, SLOT_BYTES // 4 + 1)]
    sent += [torch.full((40,), torch.nan), *[torch.ones(SLOT_BYTES // 4)] * (LINK_SLOTS + 3)]
    found = [torch.empty_like(x) for x in sent]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [SharedMemoryLink(None, part).send(x) for x in sent])
        for x in found:
            SharedMemoryLink(part, None).receive(x)
        sending.result(10)
    assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(found, sent, strict=True))
    memory.close()


def test_local_experts_are_numbered_and_others_weigh_nothing() -> None:
    """A row by itself, an extreme one too, as among others."""
    places = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 1.5], [2.0, torch.inf], [-0.0, 1e38], [3.0, 4.0]])
    native = LOCAL_EXPERTS.bind(Target())
    assert native is not LOCAL_EXPERTS.reference
    for rows in (slice(0, 4), slice(1, 2), slice(3, 4)):
        found, expected = (op(ids[rows], weights[rows], places, 2) for op in (native, LOCAL_EXPERTS.reference))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_nobody_waits_for_a_rank_that_failed() -> None:
    memory = SharedMemory(collective_bytes(2))
    group, failure = SharedMemoryCollectives(memory, 0, 2), CollectiveFailure([memory])
    waiting = threading.Thread(target=group.all_reduce, args=(torch.ones(2, 2),))
    waiting.start()
    failure.tell()
    waiting.join(10)
    assert not waiting.is_alive()
    assert failure.is_told
    failure.forget()
    assert not failure.is_told
    memory.close()
