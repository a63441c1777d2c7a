"""PoolerConfig: how a model's hidden states become vectors, and what its folder says of texts."""

from __future__ import annotations

import msgspec

from quire.types.sampling import PoolingKind


class PoolerConfig(msgspec.Struct, frozen=True, array_like=True):
    kind: PoolingKind
    size: int  # of a vector
    normalize: bool = True
    prompts: dict[str, str] = {}  # by name: what is put before a text
    default_prompt: str | None = None  # the name of the one that is put before texts that name none
    max_tokens: int | None = None  # of a text, where the folder says less than the model takes
