"""POST /pooling, /classify, /score and /rerank: what comes in (pydantic) and what goes out (msgspec)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from quire.server.generation.fields import SmallInt, Texts
from quire.server.pooling.work import Inputs, PoolingFields, PoolingUsage
from quire.types.sampling import PoolingTask


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(extra="allow", populate_by_name=True, json_schema_extra={"examples": [fields]})


class PoolingRequest(PoolingFields):
    model_config = _example(input="A cat sits on the mat.")

    input: Inputs = Field(description="Text, a list of texts, token ids, or a list of lists of token ids.")
    task: PoolingTask | None = Field(None, description="What to read of the inputs; what the model is for if unset.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers; base64: float32 values, little-endian."
    )
    dimensions: SmallInt | None = Field(None, description="Keep only this many of a vector's first values.")
    prompt_name: str | None = Field(None, description="Which of the model's own texts is put before each input.")
    instruction: str | None = Field(None, description="A text that is put before each input instead.")
    step_tag_id: SmallInt | None = Field(None, description="Of tasks with a result of each token: only this token's.")


class ClassifyRequest(PoolingFields):
    model_config = _example(input="A cat sits on the mat.")

    input: Inputs = Field(description="Text, a list of texts, token ids, or a list of lists of token ids.")


class ScoreRequest(PoolingFields):
    model_config = _example(text_1="What is a cat?", text_2=["A cat is an animal.", "Rain falls."])

    text_1: str | Texts = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), description="A text, or one for each of text_2."
    )
    text_2: str | Texts = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="What it is compared with: a text or several.",
    )
    instruction: str | None = Field(None, description="What makes a document fit, for rerankers that take it.")


class DocumentObject(BaseModel):
    text: str


class RerankRequest(PoolingFields):
    model_config = _example(query="What is a cat?", documents=["Rain falls.", "A cat is an animal."])

    query: str
    documents: list[str | DocumentObject] = Field(description="Texts, or objects with a text.")
    top_n: SmallInt | None = Field(None, description="Return only this many of the best documents; all if unset.")
    return_documents: bool | None = Field(None, description="Whether the documents' texts are in the answer.")
    max_tokens_per_doc: SmallInt | None = Field(None, description="Keep only this many tokens of each document.")
    instruction: str | None = Field(None, description="What makes a document fit, for rerankers that take it.")


class PooledData(msgspec.Struct, tag_field="object", tag="pooling"):
    index: int
    data: list[float | list[float]] | dict[str, float] | str


class PoolingAnswer(msgspec.Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[PooledData]
    usage: PoolingUsage


class Classified(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage


class Scored(msgspec.Struct, tag_field="object", tag="score"):
    index: int
    score: float


class ScoreAnswer(msgspec.Struct, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Scored]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankMeta(msgspec.Struct):
    """As Cohere's clients read it."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class RerankAnswer(msgspec.Struct):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
    meta: RerankMeta
