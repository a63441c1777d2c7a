"""ColBERT's own folders: what artifact.metadata says of queries and documents. Torch-free."""

from __future__ import annotations

import string
from pathlib import Path

import msgspec

from quire.loader.model_config import read_optional_json
from quire.types.errors import CheckpointError, ConfigError
from quire.types.pooling import HeadLayer, PoolerConfig


class _Metadata(msgspec.Struct):
    """artifact.metadata, as far as it is read, with the defaults of ColBERT's code."""

    dim: int = 128
    similarity: str = "cosine"
    query_token_id: str = "[unused0]"
    doc_token_id: str = "[unused1]"
    query_maxlen: int = 32
    attend_to_mask_tokens: bool = False
    mask_punctuation: bool = True


def read_colbert(folder: Path, size: int) -> PoolerConfig:
    """`size`: of hidden states."""
    path = folder / "artifact.metadata"
    try:
        found = msgspec.convert(read_optional_json(path), _Metadata)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} cannot be used: {error}; download it again") from error
    if found.similarity != "cosine":
        raise ConfigError(f"{path} has similarity {found.similarity!r}, which Quire does not do; known: 'cosine'")
    return PoolerConfig(
        "all",
        found.dim,
        tasks=("token_embed",),
        heads={"token_embed": (HeadLayer("linear", size, found.dim, bias=False),)},
        score="late",
        query_prefix=f"{found.query_token_id} ",
        document_prefix=f"{found.doc_token_id} ",
        query_length=found.query_maxlen,
        attends_to_masks=found.attend_to_mask_tokens,
        skiplist=tuple(string.punctuation) if found.mask_punctuation else (),
    )
