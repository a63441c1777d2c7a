"""Collectives over TCP: the bits of shared memory, an end of waiting, and strangers that are kept out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.parallel.shared_memory import SLOT_BYTES
from quire.parallel.sockets import Mesh
from quire.types.errors import EngineDeadError
from tests.parallel.test_shared_memory import parts, tree

SECRET = b"of these tests alone"


def on_ranks(size: int, work: Callable[[Mesh, int], object], rounds: int = 1, stages: int = 1) -> list[object]:
    """Ranks in threads, each with its own mesh; `work` once in each round."""
    meshes = [Mesh("127.0.0.1", SECRET, size // stages, stages) for _ in range(size)]
    addresses = [mesh.address for mesh in meshes]

    def run(rank: int) -> object:
        found = None
        for number in range(rounds):
            meshes[rank].connect(rank, addresses, number)
            found = work(meshes[rank], rank)
        return found

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))
    finally:
        for mesh in meshes:
            mesh.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (SLOT_BYTES // 4 // 64 + 1, 128)])
def test_sums_over_sockets_have_the_bits_of_shared_memory(size: int, shape: tuple[int, int]) -> None:
    mine = parts(size, *shape)
    for found in on_ranks(size, lambda mesh, rank: mesh.of_all(rank).all_reduce(mine[rank]), rounds=2):
        assert isinstance(found, Tensor)
        assert torch.equal(found, tree(mine))


@pytest.mark.parametrize(("size", "total"), [(2, 199), (3, 10), (4, SLOT_BYTES // 2)])
def test_columns_over_sockets_are_in_rank_order(size: int, total: int) -> None:
    whole, share = torch.randn(3, total, generator=torch.Generator().manual_seed(0)), -(-total // size)

    def gather(mesh: Mesh, rank: int) -> Tensor:
        return mesh.of_all(rank).all_gather(whole[:, rank * share : (rank + 1) * share], total)

    for found in on_ranks(size, gather):
        assert isinstance(found, Tensor)
        assert torch.equal(found, whole)


def test_stages_sum_among_themselves_and_hand_on() -> None:
    """Two stages of two ranks: 0 and 1, 2 and 3."""
    large = torch.randn(3 * SLOT_BYTES // 4, generator=torch.Generator().manual_seed(1)).bfloat16()

    def work(mesh: Mesh, rank: int) -> tuple[list[float], Tensor]:
        total = mesh.of_stage(rank).all_reduce(torch.tensor([[float(rank)]]))
        assert mesh.of_all(rank).minimum([10 - rank]) == [7]
        received = torch.zeros_like(large)
        link = mesh.link(rank)
        link.receive(received)
        link.send(large)
        return total[0].tolist(), received

    found: list[Any] = on_ranks(4, work, stages=2)
    assert [total for total, _ in found] == [[1.0], [1.0], [5.0], [5.0]]
    assert [torch.equal(received, large) for _, received in found] == [False, False, True, True]


@pytest.mark.parametrize("how", ["told", "gone"])
def test_nobody_waits_for_a_rank_that_failed_and_a_new_round_works(how: str) -> None:
    entered = threading.Barrier(2)

    def work(mesh: Mesh, rank: int) -> float:
        if mesh.round == 0:
            entered.wait()
            begin = time.monotonic()
            if rank == 0 and how == "told":
                threading.Timer(0.1, mesh.tell).start()
            if rank == 0:
                mesh.of_all(rank).all_reduce(torch.ones(1, 1))
                assert mesh.is_told
                assert time.monotonic() - begin < 10
            elif how == "gone":
                mesh.close_connections()
            return 0.0
        return mesh.of_all(rank).all_reduce(torch.full((1, 1), float(rank + 1))).item()

    assert on_ranks(2, work, rounds=2) == [3.0, 3.0]


def test_strangers_get_no_connection() -> None:
    """Who does not know the secret is dropped, and the rank that is expected still comes in."""
    first, second, stranger = (Mesh("127.0.0.1", key) for key in (SECRET, SECRET, b"a guess"))
    addresses = [first.address, second.address]
    with closing(first), closing(second), closing(stranger), ThreadPoolExecutor(3) as pool:
        accepting = pool.submit(first.connect, 0, addresses, 0)
        host, _, port = first.address.rpartition(":")
        with closing(socket.create_connection((host, int(port)))) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            with pytest.raises(EngineDeadError, match=r"rank 1 cannot reach rank 0.*does not know the secret"):
                stranger.connect(1, addresses, 0)
            assert not accepting.done()
            second.connect(1, addresses, 0)
            accepting.result(10)
