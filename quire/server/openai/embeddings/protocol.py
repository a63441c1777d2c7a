"""POST /v1/embeddings: what comes in (pydantic) and what goes out (msgspec)."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import ConfigDict, Field

from quire.server.generation.fields import SmallInt
from quire.server.pooling.work import Inputs, PoolingFields


class EmbeddingsRequest(PoolingFields):
    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"input": "A cat sits on the mat."}]})

    input: Inputs = Field(description="Text, a list of texts, token ids, or a list of lists of token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers; base64: float32 values, little-endian."
    )
    dimensions: SmallInt | None = Field(None, description="Keep only this many of a vector's first values.")
    prompt_name: str | None = Field(None, description="Which of the model's own texts is put before each input.")
    instruction: str | None = Field(None, description="A text that is put before each input instead.")


class Embedding(msgspec.Struct, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage
