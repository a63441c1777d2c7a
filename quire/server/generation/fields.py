"""The fields that every request for text has, in whatever API, and how they become sampling parameters.

Names and meanings are OpenAI's and, for the extra ones, vLLM's. A null is the same as leaving a field out;
what is left out comes from the model's own generation_config.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from quire.server.generation.structured import StructuredOutputs
from quire.types.errors import RequestError
from quire.types.sampling import RepetitionDetectionParams, SamplingParams

INT32 = (1 << 31) - 1

TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, le=INT32)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
SmallInt = Annotated[int, Field(ge=-INT32, le=INT32)]

# Fields that are converted, or whose meaning depends on the API.
_NOT_PLAIN = frozenset({"logprobs", "max_tokens", "repetition_detection", "structured_outputs"})


SESSION_FIELDS = ("session_id", "prompt_cache_key")  # hints: what stays in one replica. `user` is more than a session


class RepetitionDetection(BaseModel):
    """End an output whose last tokens are one pattern, several times in a row."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: SmallInt | None = Field(None, description="Tokens of the longest pattern; 0 looks for none.")
    min_pattern_size: SmallInt | None = Field(None, description="Tokens of the shortest one; 1.")
    min_count: SmallInt | None = Field(None, description="How often the pattern has to come in a row; at least 2.")


class PredictionPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """A text that the answer is expected to be much like, such as the file that is to be changed."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


ExtraArgument = str | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | bool


class GenerationFields(BaseModel):
    """The fields of every request that generates text."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="One of GET /v1/models; without it, whatever is served.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, description="Makes the answer reproducible.")
    stop: str | list[str] | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None

    top_k: SmallInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: RepetitionDetection | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: SmallInt | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: SmallInt | None = None
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a prompt is truncated: left keeps its last tokens, right its first; left."
    )
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT32)] | None = Field(
        None, description="The most tokens of thinking; the mark that ends it is forced then."
    )
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    stream_interval: SmallInt | None = Field(
        None, description="Tokens in each streamed piece; the first and the last piece come at once."
    )
    vllm_xargs: dict[str, ExtraArgument | list[ExtraArgument]] | None = Field(
        None, description="Values for the operator's own logits processors."
    )
    prediction: Prediction | None = Field(
        None, description="What the answer will be much like: where it comes true, tokens come faster."
    )
    speculate: bool | None = Field(
        None, description="Off: no draft tokens for this request. The answer is the same either way."
    )
    priority: SmallInt | None = Field(None, description="Smaller runs earlier, under --policy priority.")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached prefix.")
    request_id: str | None = Field(None, description="Part of the answer's id, instead of the x-request-id header.")

    def sampling_fields(self) -> dict[str, Any]:
        """The given fields that are sampling parameters, by the names of SamplingParams."""
        plain = type(self).model_fields.keys() & set(SamplingParams.__struct_fields__) - _NOT_PLAIN
        given: dict[str, Any] = self.model_dump(include=plain, exclude_none=True)
        if self.repetition_detection is not None:
            sizes = self.repetition_detection.model_dump(exclude_none=True)
            given["repetition_detection"] = RepetitionDetectionParams(**sizes)
        if self.vllm_xargs:
            given["extra_args"] = self.vllm_xargs
        return given


def engine_prompt(body: GenerationFields, prompt: str | list[int]) -> dict[str, Any]:
    """A prompt in the engine's form, with the request's salt, prediction and session."""
    named: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if body.cache_salt is not None:
        if not body.cache_salt.isprintable():
            raise RequestError("cache_salt must be printable text", "cache_salt")
        named["cache_salt"] = body.cache_salt
    if body.prediction is not None:
        named["prediction"] = body.prediction.text
    given = body.model_dump(include=set(SESSION_FIELDS))
    if session := next((given[name] for name in SESSION_FIELDS if isinstance(given.get(name), str)), None):
        named["session"] = session
    return named
