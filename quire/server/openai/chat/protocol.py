"""POST /v1/chat/completions: what comes in (pydantic) and what goes out (msgspec)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from quire.server.openai.logprobs import ChatLogprobs, PromptLogprob
from quire.server.openai.sampling import SamplingFields
from quire.server.openai.usage import Usage
from quire.types.request import FinishReason


class ContentPart(BaseModel):
    """A part of a message's content; only text is taken for now."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message. What else a client puts into it is handed to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class TemplateFields(BaseModel):
    """How a conversation becomes a prompt; shared with /tokenize."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = Field(None, description="End the prompt where the answer begins; on.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message; off.")
    chat_template: str | None = Field(None, description="Refused unless --allow-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    documents: list[dict[str, Any]] | None = None


class ChatCompletionRequest(SamplingFields, TemplateFields):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
            ]
        }
    )

    max_tokens: int | None = Field(None, description="Clamped to what the context leaves.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens; wins over it.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="How many candidates per token; needs logprobs.")
    echo: bool | None = Field(None, description="Begin with the last message, if it is the assistant's.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its own to what the template wrote; off."
    )


class ResponseMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
