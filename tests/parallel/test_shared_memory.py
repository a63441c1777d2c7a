"""Collectives through shared memory: sums in a fixed order, gathered columns, and an end of waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.base import Op, Target
from quire.ops.routing import COUNT_EXPERTS, LOCAL_EXPERTS
from quire.parallel.collectives import Collectives
from quire.parallel.expert_exchange import AllToAll, SlotShares
from quire.parallel.groups import ParallelGroup
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
from quire.types.errors import ConfigError
from tests.ops.inputs import INPUTS


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


def check_rows(work: Callable[[Callable[[Collectives, int], object]], list[object]], size: int, rows: int) -> None:
    """A rank has its rows of the sum, with its bits, and zeros behind them; all ranks get all rows back."""
    mine, share = parts(size, rows, 517), -(-rows // size)
    whole = torch.cat((tree(mine), torch.zeros(share * size - rows, 517)))

    def scatter(group: Collectives, rank: int) -> object:
        shard = group.reduce_scatter(mine[rank])
        assert torch.equal(group.own_rows(whole[:rows]), shard)
        line = group.gather_rows(shard[:, 0].bfloat16(), rows)  # of one value, in half precision
        assert torch.equal(group.sum_by_shares(mine[rank]), whole[:rows])
        return shard, group.gather_rows(shard, rows), line

    for rank, found in enumerate(work(scatter)):
        assert isinstance(found, tuple)
        shard, gathered, line = found
        assert torch.equal(shard, whole[rank * share : (rank + 1) * share])
        assert torch.equal(gathered, whole[:rows])
        assert torch.equal(line, whole[:rows, 0].bfloat16())


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (2, 2100), (3, 7), (4, 9), (4, 1501), (8, 3)])
def test_rows_of_a_sum_are_scattered_and_gathered(size: int, rows: int) -> None:
    """Numbers of rows that ranks do not divide, ranks without a row, and more than fill the slots."""
    check_rows(lambda scatter: on_ranks(size, scatter), size, rows)


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
        sending = pool.submit(lambda: [SharedMemoryLink(part, part).send(x) for x in sent])
        for x in found:
            SharedMemoryLink(part, part).receive(x)
        sending.result(10)
    assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(found, sent, strict=True))
    memory.close()


def routes_of(rows: int, size: int, seed: int) -> Tensor:
    """From any rank to any ranks, to none and to itself too."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(0, size, (rows,), generator=generator)
    return torch.stack((sources, torch.randint(0, 1 << size, (rows,), generator=generator)), 1)


def check_exchange(
    work: Callable[[Callable[[Collectives, int], Tensor]], list[object]], size: int, rows: int
) -> None:
    """Rows that a rank is no source of are not read, and it gets no row that it does not read."""
    routes, whole = (
        routes_of(rows, size, rows),
        torch.randn(rows, 3001, generator=torch.Generator().manual_seed(rows)),
    )

    def send(group: Collectives, rank: int) -> Tensor:
        mine = whole.masked_fill((routes[:, 0] != rank).unsqueeze(1), torch.nan)
        return [group.exchange(mine, routes) for _ in range(2)][-1]

    for rank, found in enumerate(work(send)):
        assert isinstance(found, Tensor)
        reads = (routes[:, 1] >> rank & 1).bool()
        assert torch.equal(found[reads], whole[reads])


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (2, 250), (3, 40), (4, 400)])
def test_rows_go_from_one_rank_to_some(size: int, rows: int) -> None:
    """More than fill the slots, too."""
    check_exchange(lambda send: on_ranks(size, send), size, rows)


def test_rows_of_tokens_keep_their_shape() -> None:
    """[tokens, slots, width], and in half precision the same bits."""
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    routes = torch.tensor([0, 3]).expand(5, 3, 2)
    for found in on_ranks(2, lambda group, rank: group.exchange(x if rank == 0 else torch.zeros_like(x), routes)):
        assert isinstance(found, Tensor)
        assert torch.equal(found, x)


def test_rows_wider_than_a_slot_are_refused() -> None:
    memory = SharedMemory(collective_bytes(2))
    with pytest.raises(ConfigError, match="rows of 262145 values are too wide"):
        SharedMemoryCollectives(memory, 0, 2).exchange(torch.zeros(1, SLOT_BYTES // 4 + 1), torch.zeros(1, 2).long())
    memory.close()


@pytest.mark.parametrize("op", [LOCAL_EXPERTS, COUNT_EXPERTS], ids=lambda op: str(op.name))
def test_what_is_dispatched_is_the_references(op: Op[Any]) -> None:
    """Equal, not close; a token at the same place of a shorter step goes the same way."""
    native = op.bind(Target())
    assert native is not op.reference
    for seed in range(6):
        ids, other, *rest = INPUTS[op.name](seed)
        for count in (len(ids), 1):
            given = ids[:count], other[:count] if op is LOCAL_EXPERTS else other.clone()
            found, expected = (run(*(part.clone() for part in given), *rest) for run in (native, op.reference))
            for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", [AllToAll, SlotShares])
@pytest.mark.parametrize(("tokens", "size", "cycle"), [(1, 2, 1), (13, 3, 4), (64, 4, 1)])
def test_tokens_are_dispatched_and_what_experts_give_is_combined(
    tokens: int, size: int, cycle: int, kind: type[SlotShares]
) -> None:
    """Experts that multiply by their numbers; a token whose weight is not finite spoils no other."""
    k, share = 3, 4
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, share * size, generator=generator).argsort(-1)[:, :k].to(torch.int32)
    places = torch.stack([torch.randperm(share * size, generator=generator) for _ in range(cycle)], 1).to(torch.int32)
    x, weights = torch.randn(tokens, 20, generator=generator), torch.rand(tokens, k, generator=generator)
    weights[-1, 1] = torch.inf
    given = x.unsqueeze(1) * (ids.unsqueeze(-1) + 1)
    expected = given[:, 0] * weights[:, :1]
    for slot in range(1, k):
        expected = expected + given[:, slot] * weights[:, slot : slot + 1]

    def work(collectives: SharedMemoryCollectives, rank: int) -> Tensor:
        exchange = kind(ParallelGroup(rank, size, collectives), share)
        is_mine = (torch.arange(tokens) % size == rank).unsqueeze(1)
        owned = x if kind is SlotShares else x.where(is_mine, torch.nan)
        here, *_, back = exchange.dispatch(owned, ids, weights, places)
        columns = torch.arange(tokens).unsqueeze(1) % cycle
        is_here = (places[ids.long(), columns] // share == rank).unsqueeze(-1)
        computed = (here.unsqueeze(1) * (ids.unsqueeze(-1) + 1)).where(
            is_here, 0.0 if kind is SlotShares else torch.nan
        )
        return exchange.combine(computed, weights, back)

    for found in on_ranks(size, work):
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)


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
