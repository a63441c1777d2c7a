"""POST /v1/embeddings: what comes in (pydantic) and what goes out (msgspec)."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from quire.server.generation.fields import SmallInt, TokenIds
from quire.server.openai.completions.protocol import Texts, TokenIdLists


class EmbeddingsRequest(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"input": "A cat sits on the mat."}]})

    input: str | TokenIds | Texts | TokenIdLists = Field(
        description="Text, a list of texts, token ids, or a list of lists of token ids."
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers; base64: float32 values, little-endian."
    )
    dimensions: SmallInt | None = Field(None, description="Keep only this many of a vector's first values.")
    truncate_prompt_tokens: SmallInt | None = Field(
        None, description="Keep only this many tokens of each input; -1 keeps as many as the model takes."
    )
    use_activation: bool | None = Field(None, description="Scale vectors to length 1; as the model has it if unset.")
    prompt_name: str | None = Field(None, description="Which of the model's own texts is put before each input.")
    priority: SmallInt | None = None


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
