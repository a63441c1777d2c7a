"""Turns EngineOutputs (tokens) into RequestOutputs (text): detokenizes, cuts at stop strings, groups completions.

Knows requests and text; does not talk to the engine: what must be aborted there is handed back to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.input_processor import PreparedRequest
from quire.frontend.logprobs import LogprobsDecoder
from quire.frontend.reading import CompletionReader, Reading, make_reader
from quire.frontend.stop_strings import StopStringMatcher
from quire.metrics.stats import NULL_OBSERVER, CompletionEnd, Observer, RequestEnd, TokenEvent
from quire.types.console import RequestView
from quire.types.errors import GenerationError, RefusedRequestError, RequestError
from quire.types.outputs import (
    CompletionOutput,
    EngineOutput,
    LogprobsAtPosition,
    RequestMetrics,
    RequestOutput,
)
from quire.types.request import EngineRequest, FinishReason
from quire.types.sampling import PoolingParams
from quire.types.step import Pooled, RoutedExperts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.frontend.tokenizer import Tokenizer

REPETITION_DETECTED = "repetition_detected"  # vLLM's stop_reason for it


@dataclass(slots=True)
class ProcessedOutputs:
    """What one batch of engine outputs came to."""

    outputs: list[RequestOutput] = field(default_factory=list)
    failures: list[GenerationError | RefusedRequestError] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    """Engine request ids that met a stop string or whose sibling failed: the engine must be told to stop them."""


class CompletionState:
    """One completion while it is being generated. Holds only what has not been handed out, or must be again."""

    __slots__ = (
        "_decoder",
        "_detokenizer",
        "_interval",
        "_logprobs",
        "_matcher",
        "_num_prompt_tokens",
        "_num_taken",
        "_pieces",
        "_reader",
        "_show_stop_token",
        "_stop_after",
        "_token_ids",
        "changed",
        "cumulative_logprob",
        "engine_id",
        "finish_reason",
        "first_token_time",
        "index",
        "last_token_time",
        "num_accepted_predictions",
        "num_rejected_predictions",
        "num_tokens",
        "routed_experts",
        "stop_reason",
    )

    def __init__(
        self,
        request: PreparedRequest,
        index: int,
        tokenizer: Tokenizer | None,
        decoder: LogprobsDecoder,
        reading: Reading | None,
    ) -> None:
        params = request.params
        self.index = index
        self.engine_id = request.children[index].request_id
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_accepted_predictions = 0
        self.num_rejected_predictions = 0
        self.routed_experts: list[RoutedExperts] = []
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.changed = False  # there is something to hand out
        self._interval = params.stream_interval
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_taken = 0
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._logprobs: list[LogprobsAtPosition] | None = None if params.logprobs is None else []
        self._decoder = decoder
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._show_stop_token = params.include_stop_str_in_output
        self._stop_after = params.min_tokens
        self._detokenizer: IncrementalDetokenizer | None = None
        self._matcher: StopStringMatcher | None = None
        self._reader = make_reader(reading)
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.stop:
                self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output)

    def add(self, output: EngineOutput) -> None:
        """Take in what one step added. A stop string met ends the completion, whatever the engine said."""
        token_ids = output.token_ids
        if self._detokenizer is not None:
            # The token that ended the output is one of its tokens, but is not part of its text.
            hidden = output.finish_reason == "stop" and bool(token_ids) and not self._show_stop_token
            hidden = hidden and not output.is_complete
            visible = token_ids[:-1] if hidden else token_ids
            taken = self._add_text(self._detokenizer, visible)
            if self.finish_reason is not None:
                token_ids = token_ids[:taken]
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)
        if output.num_accepted_predictions or output.num_rejected_predictions:
            self._count_predictions(output, len(token_ids))
        if token_ids and (not self._num_taken or self.num_tokens >= self._num_taken + self._interval):
            self.changed = True
        if output.routed_experts is not None:
            self.routed_experts.append(output.routed_experts)
        if self._logprobs is not None and output.logprobs is not None:
            self._add_logprobs(self._logprobs, output, len(token_ids))
        if self.finish_reason is not None:
            self.changed = True
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the completion and let out the text that was held back."""
        self.changed = True
        self.finish_reason, self.stop_reason = reason, stop_reason
        if reason == "repetition":
            self.stop_reason = REPETITION_DETECTED
        if self._detokenizer is None:
            return
        said = len(self._pieces)
        rest = self._detokenizer.flush()
        if self._matcher is None or self.num_tokens <= self._stop_after:
            self._pieces.append(rest)
        elif not self._match(self._matcher.add(rest)):
            self._match(self._matcher.flush())
        if self._reader is not None:
            self._reader.finish("".join(self._pieces[said:]))

    def take(self, delta: bool) -> CompletionOutput:
        """The completion so far, or what is new since the last call."""
        text = "".join(self._pieces)
        token_ids, logprobs = self._token_ids, self._logprobs
        if delta:
            self._pieces, self._token_ids = [], []
            self._logprobs = None if logprobs is None else []
        else:
            self._pieces = [text]
            if self.finish_reason is None:
                token_ids = token_ids.copy()
                logprobs = None if logprobs is None else logprobs.copy()
        self.changed = False
        self._num_taken = self.num_tokens
        reader, routed = self._reader, None
        if self.routed_experts and self.finish_reason is not None:
            routed = join_routed(self.routed_experts, self._num_prompt_tokens + self.num_tokens - 1)
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            None if reader is None else reader.take(delta),
            0 if reader is None else reader.num_reasoning_tokens,
            self.num_accepted_predictions,
            self.num_rejected_predictions,
            routed,
        )

    def resume(self, said: CompletionOutput) -> None:
        """Go on after what the completion's reader has of it."""
        if said.finish_reason is None:
            self.add(EngineOutput(self.engine_id, said.token_ids))
            self.take(delta=True)
        self.num_tokens = self._num_taken = len(said.token_ids)
        self.finish_reason, self.cumulative_logprob = said.finish_reason, said.cumulative_logprob
        self.num_accepted_predictions = said.num_accepted_predictions
        self.num_rejected_predictions = said.num_rejected_predictions

    def _count_predictions(self, output: EngineOutput, num_tokens: int) -> None:
        """What stands behind the end of the text was not accepted."""
        accepted = min(output.num_accepted_predictions, num_tokens)
        total = output.num_accepted_predictions + output.num_rejected_predictions
        self.num_accepted_predictions += accepted
        self.num_rejected_predictions += total - accepted

    def _add_text(self, detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> int:
        """Append the tokens' text; how many tokens were read before a stop string or a call ended the text."""
        if self._matcher is None and self._reader is None:
            if token_ids:
                self._pieces.append(detokenizer.add(token_ids))
            return len(token_ids)
        # One by one, so that what ends the output does so at the same token however the tokens arrive.
        for taken, token in enumerate(token_ids, 1):
            text = detokenizer.add([token])
            may_stop = self.num_tokens + taken > self._stop_after
            if self._matcher is None or not may_stop:
                self._pieces.append(text)
            else:
                self._match(self._matcher.add(text))
            if self._reader is not None:
                self._read(self._reader, may_stop)
            if self.finish_reason is not None:
                return taken
        return len(token_ids)

    def _read(self, reader: CompletionReader, may_stop: bool) -> None:
        """Let the reader see what the last token came to."""
        if reader.add(self._pieces[-1]) and may_stop:
            self.finish_reason, self.stop_reason = "stop", None
            reader.end_at_call()
        elif self.finish_reason is not None:
            reader.finish()

    def _match(self, found: tuple[str, str | None]) -> bool:
        text, matched = found
        self._pieces.append(text)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        return matched is not None

    def _add_logprobs(self, logprobs: list[LogprobsAtPosition], output: EngineOutput, count: int) -> None:
        total = self.cumulative_logprob or 0.0
        for position in (output.logprobs or ())[:count]:
            logprobs.append(self._decoder.decode(position))
            total += position.logprobs[0]
        self.cumulative_logprob = total


def join_routed(parts: list[RoutedExperts], num_tokens: int) -> NDArray[np.int16]:
    """[num_tokens, layers, k]; a part that was computed again, after a preemption or a crash, replaces the first."""
    import numpy as np

    joined = np.zeros((num_tokens, *parts[0].shape[1:]), np.int16)
    for part in parts:
        rows = np.frombuffer(part.data, np.int16).reshape(part.shape)[: max(0, num_tokens - part.position)]
        joined[part.position : part.position + len(rows)] = rows
    return joined


class RequestState:
    """One request: its completions and what they share."""

    __slots__ = (
        "__weakref__",
        "completions",
        "kind",
        "metrics",
        "num_cached_tokens",
        "num_unfinished",
        "params",
        "pooled",
        "pools",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "trace_headers",
    )

    def __init__(
        self,
        request: PreparedRequest,
        tokenizer: Tokenizer | None,
        decoder: LogprobsDecoder,
        reading: Reading | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.params = request.params
        self.trace_headers = request.trace_headers
        self.pools = isinstance(request.children[0].params, PoolingParams)
        self.kind = request.params.output_kind
        self.completions = [
            CompletionState(request, i, tokenizer, decoder, reading) for i in range(len(request.children))
        ]
        self.num_unfinished = len(self.completions)
        self.prompt_logprobs: list[LogprobsAtPosition | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing predicts the first token
        self.num_cached_tokens: int | None = None
        self.pooled: Pooled | None = None
        self.metrics = RequestMetrics(arrival_time=request.children[0].arrival_time)

    def unfinished_ids(self) -> list[str]:
        return [c.engine_id for c in self.completions if c.finish_reason is None]

    def take(self) -> RequestOutput | None:
        """What the caller is to hear now, if anything."""
        finished = self.num_unfinished == 0
        delta = self.kind == "delta"
        if not finished and (self.kind == "final_only" or not any(c.changed for c in self.completions)):
            return None
        completions = [c for c in self.completions if c.changed] if delta else self.completions
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [c.take(delta) for c in completions],
            finished,
            self._take_prompt_logprobs(delta, finished),
            self.metrics,
            self.num_cached_tokens,
            self.pooled,
        )

    def summary(self, now: float, error: str | None) -> RequestEnd:
        """How it went. What has not finished ends with an error."""
        return RequestEnd(
            self.request_id,
            self.params,
            len(self.prompt_token_ids),
            tuple(
                CompletionEnd(c.finish_reason or "error", c.num_tokens, c.first_token_time, c.last_token_time)
                for c in self.completions
            ),
            self.metrics.arrival_time,
            now,
            self.metrics.first_token_time,
            self.metrics.queue_time,
            self.num_cached_tokens,
            error,
            self.trace_headers,
            self.pools,
        )

    def _take_prompt_logprobs(self, delta: bool, finished: bool) -> list[LogprobsAtPosition | None] | None:
        logprobs = self.prompt_logprobs
        if logprobs is None:
            return None
        if not delta:
            return logprobs if finished else logprobs.copy()
        # Another completion may speak before the one that computes these: they are handed out once, when whole.
        if not finished and len(logprobs) < len(self.prompt_token_ids):
            return None
        self.prompt_logprobs = None
        return logprobs


class OutputProcessor:
    """The requests in progress, by the ids that the engine knows their completions by."""

    def __init__(self, tokenizer: Tokenizer | None, observer: Observer = NULL_OBSERVER) -> None:
        self._tokenizer = tokenizer
        self._observer = observer
        self._decoder = LogprobsDecoder(None if tokenizer is None else tokenizer.token_text)
        self._requests: dict[str, RequestState] = {}
        self._completions: dict[str, tuple[RequestState, CompletionState]] = {}
        self._aborting: set[str] = set()  # engine ids given up here, of which the engine has a last word to say

    def __len__(self) -> int:
        return len(self._requests)

    def prompt_of(self, engine_id: str) -> str | None:
        """The text of the prompt behind a completion; None where there is none, or it has ended."""
        entry = self._completions.get(engine_id)
        return None if entry is None else entry[0].prompt

    def held(self, why: str) -> list[RequestView]:
        """Every completion in progress, as one that no engine has, because of `why`."""
        wall = time.time() - time.monotonic()
        return [
            RequestView(
                engine_id,
                "held",
                state.metrics.arrival_time + wall,
                len(state.prompt_token_ids),
                len(state.prompt_token_ids) + completion.num_tokens,
                0,
                why=why,
            )
            for engine_id, (state, completion) in self._completions.items()
        ]

    def add(self, request: PreparedRequest, reading: Reading | None = None) -> None:
        """Expect outputs of this request; an id is refused while an older request's outputs may come under it."""
        ids = [child.request_id for child in request.children]
        used = any(i in self._completions or i in self._aborting for i in ids)
        if used or request.request_id in self._requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; wait for that request to finish or choose another id",
                "request_id",
            )
        state = RequestState(request, self._tokenizer, self._decoder, reading)
        self._requests[state.request_id] = state
        for completion in state.completions:
            self._completions[completion.engine_id] = (state, completion)

    def resume(self, request: PreparedRequest, given: RequestOutput) -> list[EngineRequest]:
        """Take in what the reader of a request has of it; the engine's requests that go on after that."""
        state = self._requests[request.request_id]
        state.num_cached_tokens = given.num_cached_tokens
        state.metrics = replace(state.metrics, num_without_state=given.metrics.num_without_state)
        if given.prompt_logprobs is not None:
            state.prompt_logprobs = None  # they are handed out once
        children = {child.request_id: child for child in request.children}
        for said in given.outputs:
            completion = state.completions[said.index]
            child = children[completion.engine_id]
            completion.resume(said)
            children[completion.engine_id] = replace(
                child, token_ids=child.token_ids + said.token_ids, num_prompt_tokens=len(child.token_ids)
            )
            if completion.finish_reason is not None:
                state.num_unfinished -= 1
                del self._completions[completion.engine_id], children[completion.engine_id]
        return list(children.values())

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """Take in outputs of one step. Outputs of requests that are gone (aborted, stopped) are dropped."""
        result = ProcessedOutputs()
        event = TokenEvent()
        touched: dict[str, RequestState] = {}
        now = time.monotonic()
        for output in outputs:
            entry = self._completions.get(output.request_id)
            if entry is None:
                if output.finish_reason is not None:
                    self._aborting.discard(output.request_id)
                continue
            state, completion = entry
            if output.error is not None or output.finish_reason == "error":
                touched.pop(state.request_id, None)
                self._fail(state, completion, output, result)
                continue
            touched[state.request_id] = state
            self._add(state, completion, output, now, result, event)
        for state in touched.values():
            taken = state.take()
            if taken is not None:
                result.outputs.append(taken)
        if event.num_generation_tokens or event.num_prompt_tokens:
            self._observer.on_tokens(event)
        return result

    def abort(self, request_id: str) -> tuple[list[str], RequestOutput | None]:
        """Forget a request: the engine ids to abort and its last output, with finish_reason "abort"."""
        state = self._requests.get(request_id)
        if state is None:
            return [], None
        ids = state.unfinished_ids()
        self._aborting.update(ids)
        for completion in state.completions:
            if completion.finish_reason is None:
                completion.finish("abort")
        state.num_unfinished = 0
        self._end(state, time.monotonic())
        return ids, state.take()

    def clear(self, error: str) -> list[str]:
        """Forget everything: the ids of the requests that were in progress."""
        states, now = list(self._requests.values()), time.monotonic()
        for state in states:
            self._end(state, now, error)
        self._aborting.clear()
        return [state.request_id for state in states]

    def _add(
        self,
        state: RequestState,
        completion: CompletionState,
        output: EngineOutput,
        now: float,
        result: ProcessedOutputs,
        event: TokenEvent,
    ) -> None:
        if output.num_cached_tokens >= 0 and state.num_cached_tokens is None:
            state.num_cached_tokens = output.num_cached_tokens
            state.metrics = replace(
                state.metrics, queue_time=output.queue_time, num_without_state=output.num_without_state
            )
        if output.prompt_logprobs and state.prompt_logprobs is not None:
            state.prompt_logprobs.extend(map(self._decoder.decode, output.prompt_logprobs))
        if output.pooled is not None:
            state.pooled = output.pooled
            event.num_prompt_tokens += len(state.prompt_token_ids)
            event.num_cached_tokens += state.num_cached_tokens or 0
        before = completion.num_tokens
        completion.add(output)
        if completion.num_tokens > before:
            _count(state, completion, completion.num_tokens - before, now, event)
        if completion.finish_reason is None:
            return
        del self._completions[completion.engine_id]
        if output.finish_reason is None:
            self._aborting.add(completion.engine_id)
            result.aborts.append(completion.engine_id)
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            self._end(state, now)

    def _fail(
        self, state: RequestState, completion: CompletionState, output: EngineOutput, result: ProcessedOutputs
    ) -> None:
        error = output.error or "the engine gave no reason"
        siblings = [i for i in state.unfinished_ids() if i != completion.engine_id]
        self._aborting.update(siblings)
        result.aborts += siblings
        if output.error_field is not None:
            result.failures.append(RefusedRequestError(state.request_id, error, output.error_field))
        else:
            result.failures.append(GenerationError(state.request_id, error))
        for other in state.completions:
            if other.finish_reason is None:
                other.finish_reason = "error" if other is completion else "abort"
        self._end(state, time.monotonic(), error)

    def _end(self, state: RequestState, now: float, error: str | None = None) -> None:
        """Forget a request and tell how it went."""
        state.metrics = replace(state.metrics, finished_time=now)
        del self._requests[state.request_id]
        for completion in state.completions:
            self._completions.pop(completion.engine_id, None)
        self._observer.on_request_end(state.summary(now, error))


def _count(state: RequestState, completion: CompletionState, num_tokens: int, now: float, event: TokenEvent) -> None:
    """Note that a completion got tokens. Runs once per completion and step."""
    event.num_generation_tokens += num_tokens
    last = completion.last_token_time
    completion.last_token_time = now
    if last is not None:
        latency = (now - last) / num_tokens
        event.token_latencies[latency] = event.token_latencies.get(latency, 0) + 1
        return
    completion.first_token_time = now
    if state.metrics.first_token_time is None:
        state.metrics = replace(state.metrics, first_token_time=now)
        event.first_token_latencies.append(now - state.metrics.arrival_time)
        event.num_prompt_tokens += len(state.prompt_token_ids)
        event.num_cached_tokens += state.num_cached_tokens or 0
