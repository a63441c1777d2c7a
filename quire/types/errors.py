"""The exception tree. Every message names the offending value and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class QuireError(Exception):
    """Root of every error that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """A setting is invalid or contradicts another one."""


class UnknownNameError(ConfigError):
    """A name is not in a registry."""

    def __init__(self, kind: str, name: str, known: Sequence[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(known) or 'none'}")
        self.kind = kind
        self.name = name
        self.known = list(known)


class ModelError(QuireError):
    """A model cannot be found, read or understood."""


class ModelNotFoundError(ModelError):
    """The model argument names nothing that exists here."""


class UnknownArchitectureError(UnknownNameError, ModelError):
    """The checkpoint's architecture has no implementation in quire/models."""


class CheckpointError(ModelError):
    """A checkpoint file is truncated, corrupt or of an unsupported format."""


class WeightMismatchError(CheckpointError):
    """Checkpoint tensors and model parameters are not a bijection."""


class AdapterError(ModelError):
    """A LoRA adapter cannot be found, read or served on this model."""


class TokenizerError(ModelError):
    """A tokenizer or chat template is missing or cannot be used."""


class DownloadError(ModelError):
    """A model could not be fetched into the cache."""


class ResourceError(QuireError):
    """The machine does not have what the settings ask for."""


class MemoryPlanError(ResourceError):
    """The memory ledger does not fit; the message names the cheapest setting that would make it fit."""


class DiskSpaceError(ResourceError):
    """There is no room for a file that must be written."""


class RequestError(QuireError, ValueError):
    """A request is invalid. `field` names the part of the request that is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Refuse a request in which the value of a field is not what is allowed."""
    if not condition:
        raise RequestError(f"{field} is {value!r} but must be {allowed}", field)


class DuplicateRequestError(RequestError):
    """A request has the id of one that has not ended."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id!r} is already being served; give every request its own id", "request_id"
        )


# By task: what it makes, and how it is asked for.
_TASKS = {
    "generate": ("text", "POST /v1/chat/completions or LLM.generate"),
    "embed": ("embeddings", "POST /v1/embeddings or LLM.embed"),
    "token_embed": ("vectors of tokens", 'POST /pooling or LLM.encode(..., pooling_task="token_embed")'),
    "classify": ("classes", "POST /classify or LLM.classify"),
    "token_classify": ("classes of tokens", 'POST /pooling or LLM.encode(..., pooling_task="token_classify")'),
    "sparse": ("weights of tokens", 'POST /pooling or LLM.encode(..., pooling_task="sparse")'),
    "score": ("scores", "POST /score, POST /rerank or LLM.score"),
}


class WrongTaskError(RequestError):
    """A model is asked for what it is not there for."""

    def __init__(self, asked: str, able: Sequence[str]) -> None:
        """`able`: the tasks that the model is there for, the main one first."""
        main = able[0]
        makes, way = _TASKS[main]
        super().__init__(
            f"this model {'generates' if main == 'generate' else 'makes'} {makes} and no {_TASKS[asked][0]};"
            f" use {way}, or {_instead(asked, able)}",
            "model",
        )


def _instead(asked: str, able: Sequence[str]) -> str:
    generates = "generate" in able
    if asked == "generate":
        return "a model that generates"
    if asked in ("embed", "token_embed") and generates:
        return "start it with --runner pooling, or with --runner generate --convert embed to do both"
    if asked in ("embed", "token_embed") and ("classify" in able or "token_classify" in able):
        return "start it with --convert embed"
    if asked in ("classify", "score") and generates:
        return "start it with --convert classify"
    return {"classify": "a model that classifies", "score": "a reranker or an embedder"}.get(
        asked, f"a model that makes {_TASKS[asked][0]}"
    )


class ContextLengthError(RequestError):
    """The prompt leaves no room for an output in the model's context.

    `num_tokens` is the length of the prompt, or a number of tokens that it is known to exceed.
    """

    def __init__(self, num_tokens: int, max_model_len: int, *, exact: bool = True, pools: bool = False) -> None:
        # Clients look for the words up to the first number: they are OpenAI's.
        super().__init__(
            f"this model's maximum context length is {max_model_len} tokens,"
            f"{'' if pools else ' prompt and output together,'} but the"
            f" prompt has {'' if exact else 'at least '}{num_tokens}; shorten the prompt, set"
            " truncate_prompt_tokens=-1, or start with a larger max_model_len",
            "prompt",
        )
        self.num_tokens = num_tokens
        self.max_prompt_tokens = max_model_len - (not pools)


class RefusedRequestError(RequestError):
    """The engine found out what is wrong with a request, such as a grammar that does not compile."""

    def __init__(self, request_id: str, message: str, field: str) -> None:
        super().__init__(message, field)
        self.request_id = request_id


class BatchError(RequestError):
    """Some requests of a batch failed; the others ran.

    `outputs` holds a RequestOutput per request, None where it failed; `errors` the error of each that did.
    """

    def __init__(self, outputs: Sequence[Any], errors: Mapping[int, QuireError]) -> None:
        index, error = min(errors.items())
        others = "" if len(errors) == len(outputs) else ", the others are in .outputs"
        message = f"{len(errors)} of {len(outputs)} requests failed{others}; request {index}: {error}"
        super().__init__(message, error.field if isinstance(error, RequestError) else None)
        self.outputs = list(outputs)
        self.errors = dict(errors)


class TraceError(QuireError):
    """A trace or a dump cannot be read, or cannot be run here; the message says why."""


class EngineError(QuireError):
    """The engine failed while serving; the request itself may be fine."""


class EngineDeadError(EngineError):
    """The engine has stopped and will serve nothing more."""


class EngineStartError(EngineDeadError):
    """The engine refused its settings or its model; starting it again as it is would not help."""


class GenerationError(EngineError):
    """One request failed inside the engine; others go on."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"request {request_id} failed: {message}")
        self.request_id = request_id


class BenchmarkError(QuireError):
    """A benchmark cannot be run, or measured nothing."""


class EngineUnavailableError(EngineError):
    """The engine takes no requests now; trying again after `retry_after` seconds may work."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(EngineUnavailableError):
    """Too many requests wait already."""
