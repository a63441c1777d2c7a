"""The sampling fields that the generating endpoints share, and how they become SamplingParams.

Names and meanings are OpenAI's and, for the extra ones, vLLM's. A null is the same as leaving a field out;
what is left out comes from the model's own generation_config.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from quire.config.groups import ServerConfig
from quire.server.openai.structured import ResponseFormat, StructuredOutputs
from quire.types.errors import RequestError
from quire.types.sampling import OutputKind, RepetitionDetectionParams, SamplingParams

INT32 = (1 << 31) - 1

TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, le=INT32)]], Field(fail_fast=True)]
SmallInt = Annotated[int, Field(ge=-INT32, le=INT32)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetection(BaseModel):
    """End an output whose last tokens are one pattern, several times in a row."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: SmallInt | None = Field(None, description="Tokens of the longest pattern; 0 looks for none.")
    min_pattern_size: SmallInt | None = Field(None, description="Tokens of the shortest one; 1.")
    min_count: SmallInt | None = Field(None, description="How often the pattern has to come in a row; at least 2.")


ExtraArgument = str | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | bool


class GenerationFields(BaseModel):
    """What may be asked of generation on every endpoint that generates."""

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
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    stream_interval: SmallInt | None = Field(
        None, description="Tokens in each streamed piece; the first and the last piece come at once."
    )
    vllm_xargs: dict[str, ExtraArgument | list[ExtraArgument]] | None = Field(
        None, description="Values for the operator's own logits processors."
    )
    priority: SmallInt | None = Field(None, description="Smaller runs earlier, under --policy priority.")
    cache_salt: str | None = Field(None, description="Requests with different salts share no cached prefix.")
    request_id: str | None = Field(None, description="Part of the answer's id, instead of the x-request-id header.")

    def sampling_fields(self) -> dict[str, Any]:
        """The fields that are sampling parameters of the same name, without those that are not given."""
        given: dict[str, Any] = self.model_dump(include=set(_PARAMS), exclude_none=True)
        if self.repetition_detection is not None:
            sizes = self.repetition_detection.model_dump(exclude_none=True)
            given["repetition_detection"] = RepetitionDetectionParams(**sizes)
        if self.vllm_xargs:
            given["extra_args"] = self.vllm_xargs
        return given


class SamplingFields(GenerationFields):
    """What completions and chat completions may be asked besides."""

    n: SmallInt | None = Field(None, description="How many completions to make of each prompt.")
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: SmallInt | None = None
    return_token_ids: bool | None = Field(None, description="Add the token ids of prompt and completion.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens in log-probabilities as "token_id:17" and not by their text.'
    )

    def names(self, field: str) -> bool:
        """Whether the client gave the field, with whatever value: answers then have what belongs to it, or a null."""
        return field in self.model_fields_set

    def wants_usage(self) -> tuple[bool, bool]:
        """Whether a stream tells the usage at its end, and with every chunk."""
        options = self.stream_options or StreamOptions()
        continuous = bool(options.continuous_usage_stats)
        return bool(options.include_usage), bool(options.include_usage) and continuous


_PARAMS = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "logit_bias",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "allowed_token_ids",
        "bad_words",
        "prompt_logprobs",
        "stream_interval",
    }
)


def sampling_params(
    body: SamplingFields,
    base: SamplingParams,
    settings: ServerConfig,
    *,
    max_tokens: int | None,
    max_model_len: int,
    logprobs: int | None,
) -> SamplingParams:
    """SamplingParams of a request over `base`. A max_tokens that no context could hold is clamped."""
    given = body.sampling_fields()
    if max_tokens is not None:
        given["max_tokens"] = min(max_tokens, max_model_len)
    kind: OutputKind = "delta" if body.stream else "final_only"
    params = msgspec.structs.replace(base, **given, logprobs=logprobs, output_kind=kind)
    check_n("n", params.n, settings)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        check_logprobs(name, count, settings.max_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not supported with stream; leave one of them out", "prompt_logprobs")
    return params


def check_n(field: str, count: int, settings: ServerConfig) -> None:
    if count > settings.max_n:
        raise RequestError(f"{field} is {count} but this server makes at most {settings.max_n} (--max-n)", field)


def check_logprobs(field: str, count: int | None, limit: int) -> None:
    if count is not None and limit != -1 and not 0 <= count <= limit:
        raise RequestError(
            f"{field} is {count} but this server gives 0 to {limit} log-probabilities per token (--max-logprobs)",
            field,
        )


def engine_prompt(body: GenerationFields, prompt: str | list[int]) -> dict[str, Any]:
    """A prompt in the engine's form, with the request's salt."""
    named: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if body.cache_salt is not None:
        if not body.cache_salt.isprintable():
            raise RequestError("cache_salt must be printable text", "cache_salt")
        named["cache_salt"] = body.cache_salt
    return named


def check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given without stream; set stream to true", "stream_options")
