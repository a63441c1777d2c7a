"""POST /v1/completions: what comes in (pydantic) and what goes out (msgspec)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from quire.server.generation.fields import SmallInt, Texts, TokenIdLists, TokenIds
from quire.server.openai.logprobs import CompletionLogprobs, PromptLogprob
from quire.server.openai.sampling import SamplingFields
from quire.server.openai.usage import Usage
from quire.types.request import FinishReason


class PromptEmbedsField(BaseModel):
    """A plain array; see docs/guides/serving.md."""

    model_config = ConfigDict(extra="forbid")

    data: str = Field(description="The base64 of the values, in C order, little-endian.")
    shape: Annotated[list[SmallInt], Field(min_length=2, max_length=2)] = Field(description="[tokens, hidden size]")
    dtype: Literal["float32", "float16", "bfloat16"]


class CompletionRequest(SamplingFields):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Once upon a time", "max_tokens": 32}],
            "required": ["prompt"],  # unless there are prompt_embeds
        }
    )

    prompt: str | TokenIds | Texts | TokenIdLists | None = Field(
        None, description="Text, a list of texts, token ids, or a list of lists of token ids."
    )
    prompt_embeds: PromptEmbedsField | None = Field(
        None, description="Embeddings in place of a prompt, if the server was started with --enable-prompt-embeds."
    )
    max_tokens: SmallInt | None = Field(
        None, description="Clamped to what the context leaves; 0 with echo only echoes."
    )
    logprobs: int | None = Field(None, description="How many candidates per token.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    best_of: SmallInt | None = Field(
        None, description="Make this many completions and return the n with the highest log-probability per token."
    )
    suffix: str | None = Field(
        None, description="What comes after the completion, for models with tokens for fill-in-the-middle."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own to a text; on.")


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    """The whole answer, or one chunk of it: the two have the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
