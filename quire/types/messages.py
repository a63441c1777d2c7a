"""Messages between a client and its engine, whichever transport carries them."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.types.outputs import EngineOutputs
from quire.types.pooling import PoolerConfig
from quire.types.request import EngineRequest
from quire.types.structured import GrammarLimits


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Command(msgspec.Struct, tag=True, frozen=True):
    """Something that the engine is to do beside its requests; a Reply with the same id answers it."""

    id: int
    verb: str
    argument: Any = None  # of the verb's type, see quire/engine/control.py


class Reply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    id: int
    value: Any = None  # of the verb's type
    error: str | None = None  # why it was not done


class EngineInfo(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What the engine found out at start and the frontend needs to know."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    grammar_limits: GrammarLimits = GrammarLimits()
    architecture: str = ""  # by its name in Hugging Face configs
    pooler: PoolerConfig | None = None  # None: it only generates
    takes_adapters: bool = False  # requests may name LoRA adapters
    routes: bool = False  # its layers have experts
    prompt_embeds_size: int = 0  # values of each embedding of a prompt; 0: prompts of embeddings are not taken
    max_num_batched_tokens: int = 0  # of a step
    releases_blocks: bool = False  # some layers keep a window of tokens or a state: a hit needs its last blocks alone


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message of an engine process: where it takes requests."""

    endpoint: str


class StartupPhase(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A part of the start begins, or has come this far."""

    name: str
    at: float  # seconds since the process was launched
    progress: float | None = None  # of the whole phase, 0 to 1; None where it cannot be told


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The start is over; requests are welcome."""

    info: EngineInfo
    at: float  # seconds since the process was launched


class EngineFailure(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The last message of an engine that failed."""

    cause: str
    is_permanent: bool  # a wrong setting or model: starting again with the same settings would fail again


ToEngine = EngineRequest | AbortRequests | Command
FromEngine = EngineOutputs | Reply | Hello | StartupPhase | Ready | EngineFailure
