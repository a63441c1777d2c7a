"""POST /v1/chat/completions: what comes in (pydantic) and what goes out (msgspec)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.answer import FinishReason
from quire.server.conversation.schema_check import SchemaReport
from quire.server.conversation.template_fields import TemplateFields
from quire.server.generation.fields import SmallInt
from quire.server.openai.logprobs import ChatLogprobs, PromptLogprob
from quire.server.openai.sampling import SamplingFields
from quire.server.openai.usage import Usage


class ContentPart(BaseModel):
    """A part of a message's content; only text is taken for now, a refusal among it."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = Field(None, description="The text of a part of type refusal, in an earlier answer.")


class ChatMessage(BaseModel):
    """One message. What else a client puts into it is handed to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart | str] | None = None
    refusal: str | None = Field(None, description="An earlier answer that has no content but a refusal.")
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = Field(None, description="Calls obey the schema also when the model is free to make them.")


class ToolDefinition(BaseModel):
    """A tool. Only functions are taken."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: FunctionDefinition | None = None


class ConversationFields(TemplateFields):
    """What the prompt of a conversation depends on; shared with /tokenize."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolDefinition] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, none, required, or {type: function, function: {name}}; auto."
    )
    reasoning_effort: str | None = Field(None, description="For templates that know it; none turns thinking off.")
    add_generation_prompt: bool | None = Field(None, description="End the prompt where the answer begins; on.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message; off.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its own to what the template wrote; off."
    )


class ChatCompletionRequest(SamplingFields, ConversationFields):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
            ]
        }
    )

    max_tokens: SmallInt | None = Field(None, description="Clamped to what the context leaves.")
    max_completion_tokens: SmallInt | None = Field(
        None, ge=1, description="The newer name of max_tokens; wins over it."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="How many candidates per token; needs logprobs.")
    echo: bool | None = Field(None, description="Begin with the last message, if it is the assistant's.")
    parallel_tool_calls: bool | None = Field(None, description="Allow more than one call in an answer; on.")
    include_reasoning: bool | None = Field(None, description="Show the model's thinking; on.")


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ResponseMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    schema_check: SchemaReport | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    schema_check: SchemaReport | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
