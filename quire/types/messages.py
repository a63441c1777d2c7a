"""Messages between a client and its engine, whichever transport carries them."""

from __future__ import annotations

import msgspec

from quire.types.outputs import EngineOutputs
from quire.types.request import EngineRequest


class AbortRequests(msgspec.Struct, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached blocks that nobody uses."""


class EngineInfo(msgspec.Struct, tag=True, frozen=True):
    """What the engine found out at start and the frontend needs to know."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int


ToEngine = EngineRequest | AbortRequests | ResetPrefixCache
FromEngine = EngineOutputs | EngineInfo
