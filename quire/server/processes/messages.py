"""What `quire serve` and its API processes say to each other, and the order that such a process is launched with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.engine.transport import Meeting
from quire.metrics.stats import HttpEnd, RequestEnd, TokenEvent
from quire.types.messages import AbortRequests, Command, EngineInfo, Reply
from quire.types.outputs import EngineOutputs, EngineStats
from quire.types.request import EngineRequest


class ApiOrder(msgspec.Struct, frozen=True):
    """What a new API process reads from stdin: a pipe, so that keys and the secret are seen by nobody else."""

    index: int
    config: EngineConfig
    settings: ServerConfig
    api_keys: Sequence[str]
    admin_keys: Sequence[str]
    meeting: Meeting
    listener_fd: int
    """The socket that all API processes accept connections from."""
    beat_fd: int
    folder: str
    """Where each process listens for what others forward, see `forward.py`."""
    secret: str
    """Marks what was forwarded."""


class ProviderState(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How the engine is; told whenever any of it has changed."""

    status: str
    detail: str
    log_level: int
    unavailable: str | None = None  # why requests are refused; None: they are taken
    retry_after: float = 0.0
    info: EngineInfo | None = None
    epoch: int = 0  # counts the engines that streams belong to
    stats: EngineStats = EngineStats()


class StreamsEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """No engine will come for the open streams."""

    reason: str


class Flush(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Tell what has been counted until now; Flushed comes after it."""

    id: int


class Drain(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Take no more requests; Drained comes when no stream is open."""

    reason: str


# Messages to the parent are maps, as EngineRequest is: one union has one form.


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The first message of an API process: the endpoint at which it receives messages."""

    endpoint: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A setting is wrong: launching the process again would not help."""

    cause: str


class Serving(msgspec.Struct, tag=True, frozen=True):
    """The process accepts connections, and has an engine for their requests."""


class Counted(msgspec.Struct, tag=True, frozen=True):
    """What has happened in an API process since it last said so."""

    tokens: TokenEvent | None
    requests: list[RequestEnd]
    calls: list[HttpEnd]


class Flushed(msgspec.Struct, tag=True, frozen=True):
    id: int


class Drained(msgspec.Struct, tag=True, frozen=True):
    pass


ToApi = EngineOutputs | Reply | ProviderState | StreamsEnded | Flush | Drain
FromApi = Joined | Failed | Serving | EngineRequest | AbortRequests | Command | Counted | Flushed | Drained
