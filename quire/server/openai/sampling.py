"""The sampling fields that completions and chat completions share, and how they become SamplingParams."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, Field

from quire.config.groups import ServerConfig
from quire.server.generation.fields import GenerationFields, SmallInt, TokenIds
from quire.server.openai.structured import ResponseFormat
from quire.types.beam_search import BeamSearchParams
from quire.types.errors import RequestError
from quire.types.sampling import OutputKind, SamplingParams


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(GenerationFields):
    """The further fields of completions and chat completions."""

    n: SmallInt | None = Field(None, description="How many completions to make of each prompt.")
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: SmallInt | None = None
    logprob_token_ids: TokenIds | None = Field(
        None, description="Token ids whose log-probabilities are returned too, at each position; logprobs is implied."
    )
    use_beam_search: bool | None = Field(
        None, description="Search for the n completions with the highest probability; nothing is sampled."
    )
    beam_width: SmallInt | None = Field(
        None, ge=1, description="How many beams a search keeps, of which the n best are returned; n."
    )
    length_penalty: float | None = Field(
        None, description="A beam's score is its log-probability, divided by its length to this power; 1."
    )
    return_token_ids: bool | None = Field(None, description="Add the token ids of prompt and completion.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens in log-probabilities as "token_id:17" and not by their text.'
    )

    def names(self, field: str) -> bool:
        """Whether the request has the field, with any value: the answer then has its field, or a null."""
        return field in self.model_fields_set

    def wants_usage(self) -> tuple[bool, bool]:
        """Whether a stream has the usage at its end, and with every chunk."""
        options = self.stream_options or StreamOptions()
        continuous = bool(options.continuous_usage_stats)
        return bool(options.include_usage), bool(options.include_usage) and continuous


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
    check_logprob_token_ids(params, settings.max_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not supported with stream; leave one of them out", "prompt_logprobs")
    return params


# What a search would not obey: it ranks by the model's own log-probabilities, and ends at end-of-sequence tokens.
_NOT_SEARCHED = (
    *("stop", "stop_token_ids", "min_tokens", "bad_words", "logit_bias", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_detection"),
    *("structured_outputs", "prompt_logprobs", "logprob_token_ids", "thinking_token_budget"),
)


def beam_search_params(
    body: SamplingFields, params: SamplingParams, base: SamplingParams, settings: ServerConfig, max_model_len: int
) -> BeamSearchParams | None:
    """The search that a request asks for, if it asks for one. `params` are its parameters over `base`."""
    if not body.use_beam_search:
        for name in ("beam_width", "length_penalty"):
            if getattr(body, name) not in (None, 1):
                raise RequestError(f"{name} is given without use_beam_search; set that to true", name)
        return None
    for name in _NOT_SEARCHED:
        if getattr(params, name) != getattr(base, name):
            raise RequestError(f"{name} is not supported with use_beam_search; leave one of them out", name)
    width = params.n if body.beam_width is None else body.beam_width
    check_n("beam_width", width, settings)
    if width < params.n:
        raise RequestError(f"beam_width is {width} but must be at least n ({params.n})", "beam_width")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=params.max_tokens or max_model_len,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
    )


def check_n(field: str, count: int, settings: ServerConfig) -> None:
    if count > settings.max_n:
        raise RequestError(f"{field} is {count} but this server makes at most {settings.max_n} (--max-n)", field)


def check_logprobs(field: str, count: int | None, limit: int) -> None:
    if count is not None and limit != -1 and not 0 <= count <= limit:
        raise RequestError(
            f"{field} is {count} but this server gives 0 to {limit} log-probabilities per token (--max-logprobs)",
            field,
        )


def check_logprob_token_ids(params: SamplingParams, limit: int) -> None:
    count = len(params.logprob_token_ids)
    if limit != -1 and count > limit:
        raise RequestError(
            f"logprob_token_ids holds {count} token ids but this server gives at most {limit} log-probabilities per"
            " token (--max-logprobs)",
            "logprob_token_ids",
        )


def check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given without stream; set stream to true", "stream_options")
