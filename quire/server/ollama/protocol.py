"""Ollama's requests (pydantic) and answers (msgspec)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from quire.server.conversation.schema_check import SchemaReport
from quire.server.generation.fields import SmallInt, TokenIds

DoneReason = Literal["stop", "length", "load", "unload"]
KeepAlive = Annotated[
    int | float | str | None,
    Field(description="Seconds, or a duration such as 5m, after which the idle engine may sleep; with --keep-alive."),
]
_OPEN = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class Options(BaseModel):
    """How to generate. What is left out comes from the model's own generation config."""

    model_config = _OPEN

    num_predict: SmallInt | None = Field(None, description="The most tokens of the answer; 0 or less: no limit.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_k: SmallInt | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = Field(None, description="Makes the answer reproducible; -1 is a random one.")
    stop: str | list[str] | None = None
    repeat_penalty: float | None = Field(None, description="Of all tokens so far, whatever repeat_last_n says.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: SmallInt | None = Field(None, description="Of no effect: the server has it from --max-model-len.")


class CalledFunction(BaseModel):
    model_config = _OPEN

    name: str
    arguments: dict[str, Any] | None = None


class InputCall(BaseModel):
    model_config = _OPEN

    id: str | None = None
    function: CalledFunction


class InputMessage(BaseModel):
    model_config = _OPEN

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(None, description="Refused: this server takes text.")
    tool_calls: list[InputCall] | None = None
    tool_name: str | None = Field(None, description="Whose result a message of the role tool is.")
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    model_config = _OPEN

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    model_config = _OPEN

    type: str | None = None
    function: FunctionDefinition


class RunFields(BaseModel):
    """The fields that chat and generate share."""

    model_config = _OPEN

    model: str | None = Field(None, description="One of GET /api/tags; without it, whatever is served.")
    stream: bool | None = Field(None, description="Lines of JSON as the answer comes; true unless it is false.")
    format: str | dict[str, Any] | None = Field(None, description='"json", or a JSON schema.')
    options: Options | None = None
    think: bool | str | None = Field(None, description="Whether to think first, or how much: low, medium or high.")
    logprobs: bool | None = None
    top_logprobs: SmallInt | None = None
    keep_alive: KeepAlive = None


class ChatRequest(RunFields):
    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello!"}]}]})

    messages: list[InputMessage] | None = Field(None, description="None at all: says that the model is loaded.")
    tools: list[ToolDefinition] | None = None


class GenerateRequest(RunFields):
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Why is the sky blue?"}]})

    prompt: str | None = Field(None, description="None at all: says that the model is loaded.")
    suffix: str | None = Field(None, description="What comes after the text that is to be filled in.")
    system: str | None = None
    raw: bool | None = Field(None, description="Take the prompt as it is, without the chat template.")
    context: TokenIds | None = Field(None, description="The context of an earlier answer, to go on from there.")
    template: str | None = Field(None, description="Refused: the model's own chat template is used.")
    images: list[Any] | None = Field(None, description="Refused: this server takes text.")


class EmbedRequest(BaseModel):
    model_config = ConfigDict(**_OPEN, json_schema_extra={"examples": [{"input": "A cat sits on the mat."}]})

    model: str | None = None
    input: str | list[str]
    truncate: bool | None = Field(None, description="Keep what fits of a long input; true unless it is false.")
    dimensions: SmallInt | None = Field(None, description="Keep only this many of a vector's first values.")
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(BaseModel):
    """The form that /api/embed replaced."""

    model_config = _OPEN

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class ShowRequest(BaseModel):
    model_config = _OPEN

    model: str | None = None
    name: str | None = Field(None, description="What older clients call the model.")
    verbose: bool | None = None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw
    index: int


class ToolCall(msgspec.Struct):
    id: str
    function: Function


class Message(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """A line of a stream, or with `done` the last one or the whole answer. Durations are nanoseconds."""

    model: str
    created_at: str
    message: Message | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    schema_check: SchemaReport | UnsetType = UNSET


class Embeddings(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Embedding(msgspec.Struct):
    embedding: list[float]


class Details(msgspec.Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class ModelList(msgspec.Struct):
    models: list[ModelEntry]


class RunningModel(msgspec.Struct):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class ModelInfo(msgspec.Struct):
    """What /api/show says."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class Version(msgspec.Struct):
    version: str
