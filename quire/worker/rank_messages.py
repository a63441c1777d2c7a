"""What the multiproc executor and its ranks say to each other: msgspec structs, and how they are framed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from quire.config.engine import EngineConfig
from quire.types.request import AdapterRef
from quire.types.step import Returned, StepPlan, StepResult
from quire.worker.description import WorkerDescription


class RankOrder(msgspec.Struct, frozen=True):
    """What a new rank reads from stdin."""

    config: EngineConfig
    rank: int
    size: int  # of all: the ranks that share every layer, times the stages
    socket_fd: int
    ring_fd: int
    collectives_fd: int
    meeting: str  # a file that does not exist yet, where ranks on GPUs find each other


class Execute(msgspec.Struct, tag=True, frozen=True):
    plan: StepPlan
    returned: list[Returned] = []  # of earlier steps, for stages that do not sample


class Sample(msgspec.Struct, tag=True, frozen=True):
    """The masks of the newest step follow as payload."""

    count: int


class Prepare(msgspec.Struct, tag=True, frozen=True):
    pass


class ReadAdapter(msgspec.Struct, tag=True, frozen=True):
    ref: AdapterRef


class ForgetAdapter(msgspec.Struct, tag=True, frozen=True):
    digest: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Say Paused when all before is done."""


class Phase(msgspec.Struct, tag=True, frozen=True):
    name: str
    progress: float | None


class Described(msgspec.Struct, tag=True, frozen=True):
    description: WorkerDescription


class Done(msgspec.Struct, tag=True, frozen=True):
    result: StepResult


class Failed(msgspec.Struct, tag=True, frozen=True):
    step_id: int
    reason: str
    is_sticky: bool
    is_echo: bool  # it failed because another rank did


class Prepared(msgspec.Struct, tag=True, frozen=True):
    more: bool


class AdapterRead(msgspec.Struct, tag=True, frozen=True):
    digest: str
    num_bytes: int
    error: str | None = None


class Paused(msgspec.Struct, tag=True, frozen=True):
    pass


class Died(msgspec.Struct, tag=True, frozen=True):
    """The last message of a rank that cannot start."""

    reason: str
    is_permanent: bool  # starting again would not help


ToRank = Execute | Sample | Prepare | ReadAdapter | ForgetAdapter | Pause
FromRank = Phase | Described | Done | Failed | Prepared | AdapterRead | Paused | Died

_LENGTH = struct.Struct("<I")
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def decode_order(data: bytes) -> ToRank:
    return _to_rank.decode(data)


def frame(message: FromRank) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Messages out of what arrives on a rank's socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, source: socket.socket) -> Iterator[FromRank]:
        """What has arrived, one read's worth. EOFError, after the last message, if the other side is gone."""
        try:
            data = source.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            message = _from_rank.decode(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield message
        if not data:
            raise EOFError


def receive_exactly(source: socket.socket, count: int) -> bytes:
    """EOFError if the other side is gone before."""
    parts = bytearray()
    while len(parts) < count:
        data = source.recv(count - len(parts))
        if not data:
            raise EOFError
        parts += data
    return bytes(parts)
