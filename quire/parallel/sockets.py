"""Connections between ranks on several hosts, and the CPU's collectives over them. See kernels/cpu/sockets.cpp.

Both sides of a connection prove that they know the secret. Between hosts it is encrypted, see quire.utils.tls.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.parallel.collectives import Collectives, NullCollectives
from quire.parallel.pipeline import Link
from quire.parallel.shared_memory import SLOT_BYTES, CpuCollectives
from quire.types.errors import EngineDeadError
from quire.utils.streams import receive_exactly
from quire.utils.tls import check_tls, seal

_HELLO = struct.Struct("<II16s")  # rank, round, nonce
_PROOF = 32  # bytes
_TICK = 0.05  # seconds, after which a wait looks whether it was ended
_LIMIT = 30.0  # seconds in which all ranks have to find each other


class Mesh:
    """A TCP connection between every two ranks. A failed step ends all waiting; `connect` starts over."""

    def __init__(
        self, host: str, secret: bytes, tensor_size: int = 1, stages: int = 1, context_size: int = 1
    ) -> None:
        """Listen on an address of this host."""
        self._listener = socket.create_server((host, 0), backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._secret, self.tensor_size, self.stages = secret, tensor_size, stages
        self.context_size = context_size
        self._sockets: dict[int, socket.socket] = {}
        self._groups: list[SocketCollectives] = []
        self.ended = np.zeros(1, dtype=np.int64)
        self.round = -1

    @property
    def is_told(self) -> bool:
        return bool(self.ended[0])

    def tell(self) -> None:
        self.ended[0] = 1

    def connect(self, rank: int, addresses: Sequence[str], round: int) -> None:
        """Connect anew with all others, who do the same for this `round`. Waits for them."""
        self.close_connections()
        deadline = time.monotonic() + _LIMIT
        if any(map(self._is_far, addresses)):
            check_tls()
        for other in range(rank):
            host, _, port = addresses[other].rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), _LIMIT)
                self._prove(other, connection, _HELLO.pack(rank, round, secrets.token_bytes(16)), addresses)
            except (OSError, EOFError) as error:
                self.close_connections()
                raise EngineDeadError(
                    f"rank {rank} cannot reach rank {other} at {addresses[other]}: {error or type(error).__name__};"
                    " ranks connect with each other, so let all ports pass between the hosts"
                ) from error
        while len(self._sockets) < len(addresses) - 1:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._accept(self._listener.accept()[0], range(rank + 1, len(addresses)), addresses, round)
            except TimeoutError:
                missing = sorted({*range(rank + 1, len(addresses))} - {*self._sockets})
                raise EngineDeadError(
                    f"ranks {missing} have not connected with rank {rank} at {self.address} in {_LIMIT:g} s;"
                    " ranks connect with each other, so let all ports pass between the hosts"
                ) from None
        self.round, self.ended[0] = round, 0
        for group in self._groups:
            group.take_sockets(self._sockets)

    def of_stage(self, rank: int) -> Collectives:
        first = rank - rank % self.tensor_size
        return self._group(rank, range(first, first + self.tensor_size))

    def of_context(self, rank: int) -> Collectives:
        first = rank - rank % self.context_size
        return self._group(rank, range(first, first + self.context_size))

    def of_all(self, rank: int) -> Collectives:
        return self._group(rank, range(self.tensor_size * self.stages))

    def link(self, rank: int) -> Link:
        count = self.tensor_size * self.stages
        return SocketLink(self, (rank - self.tensor_size) % count, (rank + self.tensor_size) % count)

    def _group(self, rank: int, members: range) -> Collectives:
        if len(members) == 1:
            return NullCollectives()
        group = SocketCollectives(self, rank, members)
        group.take_sockets(self._sockets)
        self._groups.append(group)
        return group

    def socket_to(self, rank: int) -> socket.socket:
        return self._sockets[rank]

    def close_connections(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def close(self) -> None:
        self.close_connections()
        self._listener.close()

    def _is_far(self, address: str) -> bool:
        """Whether a rank there is on another host. What stays on one needs no encryption: it passes no wire."""
        return address.rpartition(":")[0] != self.address.rpartition(":")[0]

    def _sealed(self, connection: socket.socket, address: str, *, is_server: bool) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._is_far(address):
            return connection
        limit = connection.gettimeout()
        connection = seal(connection, self._secret, is_server=is_server)
        connection.settimeout(limit)
        return connection

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(_TICK)
        self._sockets[rank] = connection

    def _prove(self, other: int, connection: socket.socket, hello: bytes, addresses: Sequence[str]) -> None:
        try:
            connection.sendall(hello)
            connection = self._sealed(connection, addresses[other], is_server=False)
            theirs = receive_exactly(connection, 16 + _PROOF)
            if not hmac.compare_digest(theirs[16:], self._proof(b"accepts", hello, theirs[:16])):
                raise OSError("it does not know the secret")
            connection.sendall(self._proof(b"connects", hello, theirs[:16]))
        except BaseException:
            connection.close()
            raise
        self._add(other, connection)

    def _accept(self, connection: socket.socket, expected: range, addresses: Sequence[str], round: int) -> None:
        """Strangers, and connections of an earlier round, are dropped."""
        connection.settimeout(5.0)
        with suppress(OSError, EOFError):
            hello, nonce = receive_exactly(connection, _HELLO.size), secrets.token_bytes(16)
            rank, of_round, _ = _HELLO.unpack(hello)
            if rank in expected and of_round == round:
                connection = self._sealed(connection, addresses[rank], is_server=True)
                connection.sendall(nonce + self._proof(b"accepts", hello, nonce))
                proof = receive_exactly(connection, _PROOF)
                if hmac.compare_digest(proof, self._proof(b"connects", hello, nonce)):
                    self._add(rank, connection)
                    return
        connection.close()

    def _proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, role + hello + nonce, "sha256")


class SocketCollectives(CpuCollectives):
    def __init__(self, mesh: Mesh, rank: int, members: range) -> None:
        super().__init__(members.index(rank), len(members))
        self._mesh, self._members = mesh, members
        self._slots = np.empty(len(members) * SLOT_BYTES, dtype=np.uint8)
        start = [mesh.ended.ctypes.data, self._rank, self._size, self._slots.ctypes.data, SLOT_BYTES]
        self._words = np.array([*start, *[-1] * len(members)], dtype=np.int64)

    def take_sockets(self, sockets: dict[int, socket.socket]) -> None:
        self._words[5:] = [sockets[rank].fileno() if rank in sockets else -1 for rank in self._members]

    def _call(self, kernel: str, x: Tensor, *arguments: int) -> None:
        getattr(bound(), f"{kernel}_over_sockets")(self._words.ctypes.data, x.data_ptr(), *arguments)

    @property
    def is_broken(self) -> bool:
        return self._mesh.is_told


class SocketLink(Link):
    def __init__(self, mesh: Mesh, before: int, after: int) -> None:
        """The ranks in this one's place of the stages beside it. Of two stages they are the same, both ways."""
        self._mesh, self._before, self._after = mesh, before, after

    def send(self, x: Tensor) -> None:
        self._move(self._after, x.contiguous(), sends=True)

    def receive(self, out: Tensor) -> bool:
        self._move(self._before, out, sends=False)
        return not self._mesh.is_told

    def _move(self, rank: int, x: Tensor, *, sends: bool) -> None:
        left = memoryview(x.view(-1).view(torch.uint8).numpy().data)
        while len(left) and not self._mesh.is_told:
            connection = self._mesh.socket_to(rank)
            try:
                moved = connection.send(left) if sends else connection.recv_into(left)
            except TimeoutError:
                continue
            except OSError:
                moved = 0
            if not moved:  # it is gone
                self._mesh.tell()
            left = left[moved:]
