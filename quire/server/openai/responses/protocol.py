"""POST /v1/responses: the request (pydantic), and the response with its items (msgspec)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.schema_check import SchemaReport
from quire.server.conversation.template_fields import TemplateFields
from quire.server.generation.fields import GenerationFields, SmallInt, TokenIds
from quire.server.openai.logprobs import ChatLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class Reasoning(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: str | None = None
    summary: str | None = Field(None, description="Any value asks for the thinking as a summary.")
    generate_summary: str | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: str
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextField(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationFields, TemplateFields):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "What is the capital of France?", "max_output_tokens": 32}]},
    )

    input: str | list[dict[str, Any]]
    instructions: str | None = Field(None, description="The system message; not carried over to later responses.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: SmallInt | None = Field(None, description="Of tools that the server itself runs.")
    text: TextField | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    store: bool | None = Field(None, description="Keep the response for later requests; on.")
    previous_response_id: str | None = None
    truncation: str | None = Field(None, description="auto leaves out the oldest items that do not fit.")
    metadata: dict[str, str] | None = None
    background: bool | None = None
    max_output_tokens: SmallInt | None = Field(None, ge=1, description="Clamped to what the context leaves.")
    top_logprobs: SmallInt | None = None
    logprob_token_ids: TokenIds | None = Field(
        None, description="Token ids whose log-probabilities are returned too, at every position of the text."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens in log-probabilities as "token_id:17" and not by their text.'
    )
    enable_response_messages: bool | None = Field(
        None, description="Add the prompt and the model's own output, as text and as token ids."
    )
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="A hint for routing; never part of what is cached.")


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class McpExecutionError(msgspec.Struct, tag_field="type", tag="mcp_tool_execution_error"):
    """The tool itself said that it failed."""

    content: list[dict[str, Any]]


class McpProtocolError(msgspec.Struct, tag_field="type", tag="mcp_protocol_error"):
    """The tool was not reached, or gave no answer."""

    message: str
    code: int = -32000  # the general one of JSON-RPC's codes for servers


McpError = McpExecutionError | McpProtocolError


class McpCallItem(msgspec.Struct, tag_field="type", tag="mcp_call"):
    """A call that the server made itself, with what came of it."""

    id: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: McpError | None = None
    approval_request_id: str | None = None


class McpToolInfo(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class McpListToolsItem(msgspec.Struct, tag_field="type", tag="mcp_list_tools"):
    id: str
    server_label: str
    tools: list[McpToolInfo]
    error: str | None = None


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | McpCallItem | McpListToolsItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens", "content_filter"]


class RawMessage(msgspec.Struct, tag_field="type", tag="raw_message_tokens"):
    """What the model read or wrote in one turn."""

    message: str
    tokens: list[int]


class Response(msgspec.Struct, tag_field="object", tag="response", kw_only=True):
    """The response. It repeats the settings of the request."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    text: dict[str, Any]
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    truncation: str = "disabled"
    metadata: dict[str, str] = {}
    background: bool = False
    store: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
    service_tier: str = "default"
    user: str | UnsetType = UNSET
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    schema_check: SchemaReport | UnsetType = UNSET
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET


class InputTokens(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class Deleted(msgspec.Struct, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class ItemList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
