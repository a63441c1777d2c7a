"""POST /v1/messages: what comes in (pydantic) and what goes out (msgspec), in Anthropic's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.template_fields import TemplateFields
from quire.server.generation.fields import INT32, GenerationFields, SmallInt

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class InputBlock(BaseModel):
    """A block of content of any type; which fields it has depends on `type`, and is checked where it is read."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def others(self) -> dict[str, Any]:
        """The fields besides `type`."""
        return self.model_extra or {}


class InputMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[InputBlock]


class ToolDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceField(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    display: str | None = None
    budget_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = Field(
        None, description="The most tokens of thinking; the mark that ends it is forced then."
    )


class FormatField(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: str
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: str | None = None
    format: FormatField | None = None


class PromptFields(TemplateFields):
    """What the prompt is made of; shared with /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="One of GET /v1/models; without it, whatever is served.")
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[InputBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = Field(None, description="Left out, the model does as its template has it.")
    output_config: OutputConfig | None = None
    output_format: FormatField | None = Field(None, description="The older place of output_config.format.")


class MessagesRequest(GenerationFields, PromptFields):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"max_tokens": 32, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
            ]
        }
    )

    max_tokens: Annotated[SmallInt, Field(ge=1, description="Clamped to what the context leaves.")]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None


class CountTokensRequest(PromptFields):
    """A conversation whose prompt tokens are counted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "What is the capital of France?"}]}]
        }
    )


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[ContentBlock]
    usage: Usage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Keeps the connection alive."""


class BlockStartEvent(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDeltaEvent(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStopEvent(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopInfo(msgspec.Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: StopInfo
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The stream is complete."""


StreamEvent = MessageStart | Ping | BlockStartEvent | BlockDeltaEvent | BlockStopEvent | MessageDelta | MessageStop


class TokenCount(msgspec.Struct):
    input_tokens: int


class ModelInfo(msgspec.Struct, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
