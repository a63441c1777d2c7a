"""Outputs: EngineOutputs (tokens, from the engine) and RequestOutput (text, for the caller)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from quire.types.events import Event
from quire.types.request import FinishReason
from quire.types.step import Pooled, RoutedExperts, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PooledT = TypeVar("PooledT")


class EngineOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one step added to one request. It is never part of a cycle, so the garbage collector skips it."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop_token_id that was met; None for end-of-sequence
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = -1  # sent with the first output: prompt tokens found in the prefix cache
    error: str | None = None
    pooled: Pooled | None = None
    queue_time: float | None = None  # sent with the first output: seconds from arrival until it was first planned
    is_complete: bool = False  # it stopped because its grammar allows no more: the last token is part of the text
    error_field: str | None = None  # the part of the request that is wrong, if the error is the caller's
    num_accepted_predictions: int = 0  # tokens of the request's prediction that were verified and held
    num_rejected_predictions: int = 0  # those that did not
    routed_experts: RoutedExperts | None = None
    num_without_state: int = 0  # sent with the first output: prompt tokens cached but for a state to go on from


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of the scheduler after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0  # since start
    prefix_queries: int = 0  # tokens looked up since start
    prefix_hits: int = 0  # tokens found since start
    step_tokens: int = 0  # tokens computed in this step
    step_time: float = 0.0  # seconds this step took; 0 when no step was finished
    prompt_tokens: int = 0  # computed since start
    num_prefilling: int = 0  # of those running: their prompts are not computed yet
    prefill_tokens_left: int = 0  # theirs
    num_drafts: int = 0  # since start: times that a row verified drafts
    num_draft_tokens: int = 0  # theirs
    num_accepted_tokens: int = 0  # those that held
    accepted_per_position: tuple[int, ...] = ()  # the same, by their place among the drafts of a row
    prefix_without_state: int = 0  # tokens since start that were cached, but for a recurrent state to go on from
    expert_load: dict[int, list[int]] = {}  # that came with this step, as in StepResult

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use; 1 is all of them."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class CacheChanges(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What an engine has cached of prefixes since it last said so, by names of blocks: quire/kv/stream.py."""

    stored: bytes
    evicted: bytes = b""
    weights: str | None = None  # digest of the weights; set where `stored` is all that is cached


class EngineOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=True):
    outputs: list[EngineOutput]
    stats: EngineStats | None = None
    cached: CacheChanges | None = None  # if it was asked for, and anything changed


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAtPosition = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, frozen=True):
    """One completion of a prompt, as far as it has been generated."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[Event] | None = None  # the text as thinking, text and calls, where it is read as such
    num_reasoning_tokens: int = 0  # of all tokens so far, those of thinking
    num_accepted_predictions: int = 0  # tokens of the request's prediction so far that were drafts and held
    num_rejected_predictions: int = 0  # those that did not hold
    routed_experts: NDArray[np.int16] | None = None
    """[tokens, layers, k], if it was asked for and the completion is finished: where all tokens but the last went."""

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, frozen=True):
    """How a request went. Times are on the frontend's monotonic clock, in seconds."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    queue_time: float | None = None  # seconds from arrival until the engine first planned it
    num_without_state: int = 0  # prompt tokens that were cached, but for a state of recurrent layers to go on from


class RequestOutput(msgspec.Struct, frozen=True):
    """The result of one prompt; `outputs` has one entry per completion asked for with `n`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    metrics: RequestMetrics = RequestMetrics()
    num_cached_tokens: int | None = None
    pooled: Pooled | None = None  # of a request that pools, which has no completions' tokens


class PoolingOutput(msgspec.Struct, frozen=True):
    """What was read of a prompt: a vector [size], or one for each token [num_tokens, size]; float32."""

    data: NDArray[np.float32]


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, frozen=True):
    """A value for each class: probabilities, unless the model or the request says otherwise."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, frozen=True):
    """How well two texts go together."""

    score: float


class PoolingRequestOutput(msgspec.Struct, Generic[PooledT], frozen=True):
    """The result of one prompt that was pooled. Names follow vLLM's class of the same name."""

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
