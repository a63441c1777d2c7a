"""A request as the engine sees it: tokens and numbers, never text."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.structured import GrammarSource

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """One image, clip or sound inside a prompt: which placeholder tokens it fills."""

    hash: bytes
    offset: int
    length: int
    kind: str
    embed_mask: bytes | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Built once by the frontend's input processor; read-only afterwards."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams | PoolingParams
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the output unless ignore_eos."""
    seed: int = 0
    """The sampling key, always set: params.seed folded with the child index, or drawn at random."""
    max_tokens: int = 16
    """params.max_tokens after clamping to what the context leaves."""
    grammar: GrammarSource | None = None
    """What the output must obey: params.structured_outputs after checking."""
    prompt_embeds: bytes | None = None
    media: tuple[MediaItem, ...] = ()
    adapter_id: int = 0
    priority: int = 0
    """Smaller runs earlier, under the priority policy."""
    cache_salt: str | None = None
    """Requests with different salts never share cached blocks."""
    arrival_time: float = 0.0
    engine_index: int = 0
