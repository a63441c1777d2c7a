"""Applying a step's result: append tokens, see who is done, cache full blocks, build the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from quire.sched.request import CAUGHT_UP, Request, Status
from quire.sched.state import InFlight, SchedulerState
from quire.types.errors import EngineError
from quire.types.outputs import EngineOutput
from quire.types.request import FinishReason
from quire.types.sampling import SamplingParams
from quire.types.status import MESSAGES, NO_TOKEN
from quire.types.step import StepResult, TokenLogprobs


def apply_result(state: SchedulerState, step: InFlight, result: StepResult) -> list[EngineOutput]:
    """Apply the result of the oldest step in flight."""
    if len(result.token_ids) != len(step.requests):
        raise EngineError(
            f"step {result.step_id} planned {len(step.requests)} rows but its result has {len(result.token_ids)}"
        )
    outputs: list[EngineOutput] = []
    finished: set[Request] = set()
    columns = (result.logprobs, result.prompt_logprobs, result.routed_experts, result.errors, result.pooled)
    special = set(chain(step.chunks, step.drafts, *columns))  # row indices that need more than the common case
    emit = outputs.append
    store = state.kv.store
    index = -1
    for request, tokens in zip(step.requests, result.token_ids, strict=True):
        index += 1
        if request.steady and len(tokens) == 1 and (not special or index not in special):
            # The common case of apply_tokens() and _apply_row(), written out: one token for a running request.
            token = tokens[0]
            known = request.token_ids
            known.append(token)
            length = len(known)
            if length > request.store_above:
                request.store_above = store(request.kv, known, length - 1)
            if length < request.max_tokens_total and token not in request.stop_tokens:
                emit(EngineOutput(request.request_id, tokens))
                continue
            reason, stop_reason = _why_finished(request, token, length)
            emit(EngineOutput(request.request_id, tokens, reason, stop_reason))
        elif request.status is not Status.FINISHED:
            output = _apply_row(state, step, result, index)
            if output is None:
                continue
            emit(reported(request, output))
            if output.finish_reason is None:
                continue
        else:
            continue
        state.end(request)
        finished.add(request)
    if finished:
        state.forget_finished(finished)
    return outputs


def _apply_row(state: SchedulerState, step: InFlight, result: StepResult, index: int) -> EngineOutput | None:
    """Apply one row in full generality; None when there is nothing to say yet."""
    request = step.requests[index]
    request_id = request.request_id
    if index in result.errors:
        error = result.errors[index]
        return EngineOutput(request_id, [], "error", error=error, error_field=_blamed(request, error))
    chunk = step.chunks.get(index)
    num_drafts = len(step.drafts.get(index, ()))
    end = chunk.end if chunk is not None else len(request.token_ids)
    start = end + num_drafts - step.plan.num_tokens[index]
    state.prompt_tokens += max(0, min(end, request.num_prompt_tokens) - start)
    prompt_logprobs = _new_prompt_logprobs(request, start, result.prompt_logprobs.get(index))
    routed = result.routed_experts.get(index)
    if chunk is not None:
        if request.status is Status.RUNNING and chunk.num_preemptions == request.num_preemptions:
            request.num_confirmed_tokens = end
            state.kv.store(request.kv, request.token_ids, end)
            _end_retry(state, request, end)
        if not prompt_logprobs and routed is None:
            return None
        return EngineOutput(request_id, [], prompt_logprobs=prompt_logprobs, routed_experts=routed)
    if request.pools:
        if index not in result.pooled:
            return EngineOutput(request_id, [], "error", error="the step returned no pooled output for it")
        if request.status is Status.RUNNING:
            state.kv.store(request.kv, request.token_ids, end)
        return EngineOutput(request_id, [], "stop", pooled=result.pooled[index])

    tokens = result.token_ids[index]
    if len(tokens) > 1 + num_drafts:
        error = f"the step returned {len(tokens)} tokens for it but had {num_drafts} drafts to verify"
        return EngineOutput(request_id, [], "error", error=error)
    _retract(request, 1 + num_drafts - len(tokens))
    tokens, reason, stop_reason = _append(request, tokens)
    if request.status is Status.RUNNING:
        request.num_confirmed_tokens = CAUGHT_UP
        request.store_above = state.kv.store(request.kv, request.token_ids, request.num_certain_tokens)
        state.note_progress(request)
        _end_retry(state, request, request.num_certain_tokens)
    if not tokens and not prompt_logprobs:
        return None
    if request.status is Status.RUNNING:
        request.steady = len(request.token_ids) >= request.min_tokens_total and request.repetition is None
    logprobs = result.logprobs.get(index)
    num_predicted = num_drafts if index in step.predicted else 0
    num_held = min(num_predicted, len(result.token_ids[index]) - 1, len(tokens)) if num_predicted else 0
    return EngineOutput(
        request_id,
        tokens,
        reason,
        stop_reason,
        None if logprobs is None else logprobs[: len(tokens)],
        prompt_logprobs,
        num_accepted_predictions=num_held,
        num_rejected_predictions=num_predicted - num_held,
        routed_experts=routed,
    )


def reported(request: Request, output: EngineOutput) -> EngineOutput:
    """`output`, which tells the number of cached tokens and the queue time if no output before it has."""
    if request.reported:
        return output
    request.reported = True
    return msgspec.structs.replace(
        output,
        num_cached_tokens=request.num_cached_tokens,
        queue_time=request.queue_time,
        num_without_state=request.num_without_state,
    )


def _blamed(request: Request, error: str) -> str | None:
    """The field of the request that left no token to choose from, if that is the error."""
    params, grammar = request.engine_request.params, request.engine_request.grammar
    if error != MESSAGES[NO_TOKEN] or not isinstance(params, SamplingParams):
        return None
    constraints: dict[str, object] = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
        "min_tokens": params.min_tokens,
    }
    if grammar is not None:
        constraints[f"structured_outputs.{grammar.kind}"] = grammar.text
    return next((field for field, value in constraints.items() if value), None)


def _retract(request: Request, count: int) -> None:
    """So many tokens that were planned for did not hold: lower the upper bounds, which steps in flight stand on."""
    request.num_tokens -= count
    if request.status is Status.RUNNING:
        request.num_computed_tokens -= count


def _append(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
    """Append sampled tokens up to the first that ends the request; those after it are dropped."""
    known = request.token_ids
    for count, token in enumerate(tokens, 1):
        known.append(token)
        repeats = request.repetition is not None and request.repetition.add(token)
        reason, stop_reason = _why_finished(request, token, len(known))
        if reason is None and repeats and len(known) >= request.min_tokens_total:
            reason = "repetition"
        if reason is not None:
            return tokens[:count], reason, stop_reason
    return tokens, None, None


def _why_finished(request: Request, token: int, num_known: int) -> tuple[FinishReason | None, int | None]:
    if token in request.stop_tokens and num_known >= request.min_tokens_total:
        return "stop", token if token in request.stop_token_ids else None
    if num_known >= request.max_tokens_total:
        return "length", None
    return None, None


def _new_prompt_logprobs(
    request: Request, start: int, logprobs: Sequence[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """Those not given out before a preemption. The ones a step gives cover tokens start+1, start+2, ..."""
    if not logprobs:
        return None
    fresh = list(logprobs[max(0, request.num_prompt_logprobs - start) :])
    request.num_prompt_logprobs += len(fresh)
    return fresh or None


def _end_retry(state: SchedulerState, request: Request, num_computed_tokens: int) -> None:
    """A request that got alone past the point where a step failed is innocent."""
    if request.retry_until and num_computed_tokens >= request.retry_until:
        request.retry_until = 0
        state.retries.remove(request)
