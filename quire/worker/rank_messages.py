"""What executors and their ranks say to each other: msgspec structs, and how they are framed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from quire.config.engine import EngineConfig
from quire.types.request import AdapterRef
from quire.types.step import Returned, StepPlan, StepResult
from quire.worker.description import WorkerDescription
from quire.worker.joining import Lost


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


class Sleep(msgspec.Struct, tag=True, frozen=True):
    level: int


class Wake(msgspec.Struct, tag=True, frozen=True):
    pass


class CheckWeights(msgspec.Struct, tag=True, frozen=True):
    """Whether this rank could replace its weights by those of a folder, and their digest."""

    path: str


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    path: str


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


class Changed(msgspec.Struct, tag=True, frozen=True):
    """The last Sleep, Wake, CheckWeights or UpdateWeights has ended on this rank."""

    digest: str
    error: str | None = None  # it was not done; the rank is as it was
    is_fatal: bool = False  # it cannot go on


class Paused(msgspec.Struct, tag=True, frozen=True):
    pass


class Died(msgspec.Struct, tag=True, frozen=True):
    """The last message of a rank that cannot start or go on."""

    reason: str
    is_permanent: bool  # starting again would not help


class Join(msgspec.Struct, tag=True, frozen=True):
    """A rank on any host asks for a place; it asks again every second until it has one."""

    version: str
    host: str
    pid: int
    address: str  # where other ranks connect with it


class Placement(msgspec.Struct, tag=True, frozen=True):
    """Its answer. The rank says Present, then waits for Connect."""

    config: EngineConfig
    rank: int
    meeting: str  # of ranks on GPUs


class Present(msgspec.Struct, tag=True, frozen=True):
    digest: str  # of the model, as this host has it


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Connect with all ranks, at the start and after a failed step."""

    addresses: list[str]
    round: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A rank failed: do not wait for others in collectives of this round."""

    round: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    reason: str
    is_refused: bool = False  # joining again would not help


class Beat(msgspec.Struct, tag=True, frozen=True):
    """I live. Both sides say it."""

    is_placed: bool = False  # a rank says whether it has a place


RankChange = Sleep | Wake | CheckWeights | UpdateWeights
_Work = Execute | Sample | Prepare | ReadAdapter | ForgetAdapter | RankChange | Pause
ToRank = _Work | Placement | Connect | Ended | Leave | Beat
_Said = Phase | Described | Done | Failed | Prepared | AdapterRead | Changed | Paused | Died
FromRank = _Said | Join | Present | Beat | Lost

_LENGTH = struct.Struct("<I")
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def decode_order(data: bytes) -> ToRank:
    return _to_rank.decode(data)


def decode_report(data: bytes) -> FromRank:
    return _from_rank.decode(data)


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
