"""Messages between a client and its engine, whichever transport carries them."""

from __future__ import annotations

import msgspec

from quire.types.outputs import EngineOutputs
from quire.types.request import EngineRequest
from quire.types.structured import GrammarLimits, Vocabulary


class AbortRequests(msgspec.Struct, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached blocks that nobody uses."""


class EngineInfo(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What the engine found out at start and the frontend needs to know."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    grammar_limits: GrammarLimits = GrammarLimits()


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine process: where it takes requests."""

    endpoint: str


class StartupPhase(msgspec.Struct, tag=True, array_like=True):
    """A part of the start begins, or has come this far."""

    name: str
    at: float  # seconds since the process was launched
    progress: float | None = None  # of the whole phase, 0 to 1; None where it cannot be told


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The start is over; requests are welcome."""

    info: EngineInfo
    at: float  # seconds since the process was launched


class EngineFailure(msgspec.Struct, tag=True, array_like=True):
    """The last message of an engine that failed."""

    cause: str
    is_permanent: bool  # a wrong setting or model: starting again with the same settings would fail again


ToEngine = EngineRequest | AbortRequests | ResetPrefixCache | Vocabulary
FromEngine = EngineOutputs | Hello | StartupPhase | Ready | EngineFailure
