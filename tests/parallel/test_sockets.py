"""Collectives over TCP: the bits of shared memory, an end of waiting, and strangers that are kept out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.parallel.shared_memory import SLOT_BYTES
from quire.parallel.sockets import Mesh
from quire.types.errors import EngineDeadError
from quire.utils.streams import receive_exactly
from quire.utils.tls import seal
from tests.parallel.test_shared_memory import check_exchange, check_rows, parts, tree

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


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (2, 2100), (4, 9), (3, 1501)])
def test_rows_of_a_sum_over_sockets_are_scattered_and_gathered(size: int, rows: int) -> None:
    check_rows(lambda scatter: on_ranks(size, lambda mesh, rank: scatter(mesh.of_all(rank), rank)), size, rows)


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (3, 300)])
def test_rows_over_sockets_go_from_one_rank_to_some(size: int, rows: int) -> None:
    check_exchange(
        lambda send: on_ranks(size, lambda mesh, rank: send(mesh.of_all(rank), rank), rounds=2), size, rows
    )


def test_stages_sum_among_themselves_and_hand_on() -> None:
    """Two stages of two ranks: 0 and 1, 2 and 3. The last one answers over the same connections."""
    large = torch.randn(3 * SLOT_BYTES // 4, generator=torch.Generator().manual_seed(1)).bfloat16()

    def work(mesh: Mesh, rank: int) -> tuple[list[float], Tensor, list[int]]:
        total = mesh.of_stage(rank).all_reduce(torch.tensor([[float(rank)]]))
        assert mesh.of_all(rank).minimum([10 - rank]) == [7]
        received, tokens = torch.zeros_like(large), torch.zeros(3, dtype=torch.int32)
        link = mesh.link(rank)
        if rank < 2:
            link.send(large)
            link.receive(tokens)
        else:
            link.receive(received)
            link.send(torch.full_like(tokens, rank))
        return total[0].tolist(), received, tokens.tolist()

    found: list[Any] = on_ranks(4, work, stages=2)
    assert [total for total, _, _ in found] == [[1.0], [1.0], [5.0], [5.0]]
    assert [torch.equal(received, large) for _, received, _ in found] == [False, False, True, True]
    assert [tokens for _, _, tokens in found] == [[2] * 3, [3] * 3, [0] * 3, [0] * 3]


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


class Middle:
    """A man in the middle of rank 1's connection with rank 0: he sees every byte, and may change some."""

    def __init__(self, target: str, *, changes: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.3", 0))
        self.address = f"127.0.0.3:{self._listener.getsockname()[1]}"
        self._target, self.changes, self.seen = target, changes, bytearray()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            near = self._listener.accept()[0]
            host, _, port = self._target.rpartition(":")
            far = socket.create_connection((host, int(port)))
            self._sockets += [near, far]
            threading.Thread(target=self._pass_on, args=(far, near), daemon=True).start()
            self._pass_on(near, far)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if self.changes:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            end.close()


MARK = torch.full((4, 64), 1234.5)


def add_up(meshes: tuple[Mesh, Mesh], pool: ThreadPoolExecutor) -> list[Tensor]:
    groups = [mesh.of_all(rank) for rank, mesh in enumerate(meshes)]
    sums = [pool.submit(group.all_reduce, MARK.clone()) for group in groups]
    return [one.result(10) for one in sums]


@pytest.mark.parametrize("other_host", ["127.0.0.1", "127.0.0.2"])
def test_between_hosts_nobody_reads_or_changes_a_tensor_and_on_one_host_nothing_is_spent(other_host: str) -> None:
    meshes = first, second = Mesh("127.0.0.1", SECRET, 2), Mesh(other_host, SECRET, 2)
    is_far = other_host != "127.0.0.1"
    with closing(first), closing(second), closing(Middle(first.address)) as middle, ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(first.connect, 0, [first.address, second.address], 0)
        second.connect(1, [middle.address if is_far else first.address, second.address], 0)
        accepting.result(10)
        families = {mesh.socket_to(1 - rank).family for rank, mesh in enumerate(meshes)}
        assert families == {socket.AF_UNIX if is_far else socket.AF_INET}
        assert all(torch.equal(found, 2 * MARK) for found in add_up(meshes, pool))
        if not is_far:
            return
        assert len(middle.seen) > 2 * MARK.nbytes
        assert MARK[0, :4].numpy().tobytes() not in middle.seen
        middle.changes = True
        for mesh, found in zip(meshes, add_up(meshes, pool), strict=True):
            assert mesh.is_told or torch.equal(found, 2 * MARK)
        assert first.is_told or second.is_told  # who got a changed byte takes nothing of it


@pytest.mark.parametrize("how", ["another secret", "no encryption"])
def test_who_poses_as_a_rank_of_another_host_is_refused(how: str) -> None:
    """Nor does he get anything but the rank's number out of it."""
    heard = b""

    def pose() -> None:
        nonlocal heard
        connection = listener.accept()[0]
        with closing(connection), suppress(OSError, EOFError):
            connection.settimeout(10)
            receive_exactly(connection, 24)
            if how == "no encryption":
                connection.sendall(bytes(48))
                heard = connection.recv(1 << 16)
                return
            with closing(seal(connection, b"a guess", is_server=True)) as sealed:
                sealed.settimeout(10)
                heard = sealed.recv(1)

    second = Mesh("127.0.0.2", SECRET)
    with closing(second), socket.create_server(("127.0.0.3", 0)) as listener, ThreadPoolExecutor(1) as pool:
        posing = pool.submit(pose)
        with pytest.raises(EngineDeadError, match="rank 1 cannot reach rank 0"):
            second.connect(1, [f"127.0.0.3:{listener.getsockname()[1]}", second.address], 0)
        posing.result(10)
    assert heard[:1] == (b"\x16" if how == "no encryption" else b"")  # a TLS handshake
