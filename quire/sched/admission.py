"""Admission: refusing what can never run, and starting waiting requests while a step has room."""

from __future__ import annotations

from quire.sched.request import Request, Status
from quire.sched.state import SchedulerState, StepDraft
from quire.types.errors import DuplicateRequestError, RequestError
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams
from quire.types.step import RowStart

# While others run, this part of the pool stays free at an admission: room for them to grow, so that they do
# not preempt at once what was just admitted.
_SPARE_SHARE = 100


def check_request(state: SchedulerState, request: EngineRequest) -> None:
    """Raise RequestError for a request that the engine could never finish."""
    limits = state.limits
    name = f"request {request.request_id!r}"
    num_given = request.num_given_outputs
    num_prompt_tokens = len(request.token_ids) - num_given
    if request.request_id in state.requests:
        raise DuplicateRequestError(request.request_id)
    if num_prompt_tokens <= 0:
        raise RequestError(f"{name} has an empty prompt; give at least one token", "token_ids")
    if num_given < 0:
        raise RequestError(
            f"{name} has num_prompt_tokens {num_prompt_tokens} but only {len(request.token_ids)} token_ids",
            "num_prompt_tokens",
        )
    pools = isinstance(request.params, PoolingParams)
    longest_prompt = limits.max_model_len if pools else limits.max_model_len - 1
    if num_prompt_tokens > longest_prompt:
        raise RequestError(
            f"{name} has {num_prompt_tokens} prompt tokens but max_model_len {limits.max_model_len} takes "
            f"{longest_prompt}; shorten the prompt or raise --max-model-len",
            "token_ids",
        )
    if request.max_tokens < 1 and not pools:
        raise RequestError(f"{name} has max_tokens {request.max_tokens} but it must be at least 1", "max_tokens")
    if num_given and num_given >= min(request.max_tokens, limits.max_model_len - num_prompt_tokens):
        raise RequestError(f"{name} has ended: it has {num_given} outputs already", "token_ids")
    # The last token of an output is never computed.
    num_outputs = 0 if pools else min(request.max_tokens, limits.max_model_len - num_prompt_tokens) - 1
    num_tokens = num_prompt_tokens + num_outputs
    needed, present = state.kv.needed_and_present(num_tokens, limits.max_num_batched_tokens)
    if needed > present:
        raise RequestError(
            f"{name} may grow to {num_tokens} tokens, which takes {needed} KV blocks, but there are "
            f"{present}; lower max_tokens or max_model_len, or raise --kv-cache-memory",
            "max_tokens" if num_outputs else "token_ids",
        )


def admit_waiting(state: SchedulerState, step: StepDraft) -> None:
    """Start waiting requests in order, until one does not fit. None in a step that was short of blocks.

    Some requests that are not to start yet may be passed; they keep their places.
    """
    waiting = state.waiting
    passed: list[Request] = []
    while waiting and step.budget and state.has_row and not step.out_of_blocks:
        request = waiting.peek()
        if request.num_pending:
            break
        if not state.shares.may_start(state, step, request) or not state.adapters.may_start(request):
            if len(passed) >= state.shares.most_passed():
                break
            passed.append(waiting.pop())
            continue
        if not admit(state, step, request):
            state.blocked = request.key
            break
        state.blocked = None
        waiting.pop()
    for request in reversed(passed):
        waiting.push_back_in(request)


def admit(state: SchedulerState, step: StepDraft, request: Request) -> bool:
    """Give a request a row and blocks and plan its first tokens; False, changing nothing, if there is no room."""
    kv = state.kv
    if not state.adapters.has_room(request):
        return False
    may_reuse_prefix = request.may_reuse_prefix
    hit = kv.find_prefix(request.kv, request.token_ids) if may_reuse_prefix else kv.no_prefix()
    num_cached = hit.num_tokens
    most = state.limits.max_num_batched_tokens
    if state.running and not step.retry and not kv.fits_now(hit, request.num_tokens, most, _SPARE_SHARE):
        return False
    wanted = request.num_tokens - num_cached
    count = min(wanted, step.budget) if step.retry else state.shares.of_new(state, step, request, num_cached, wanted)
    row = state.rows.free[-1]
    if not kv.start(request.kv, hit, num_cached + count, row, step.deltas):
        return False
    request.row = state.rows.take()
    request.status = Status.RUNNING
    request.num_computed_tokens = request.num_confirmed_tokens = num_cached
    request.capacity = kv.capacity(request.kv)
    request.store_above = 0
    if request.num_cached_tokens < 0:
        request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
        request.queue_time = max(0.0, step.now - request.engine_request.arrival_time)
        if may_reuse_prefix:
            state.prefix_queries += request.num_tokens
            state.prefix_hits += num_cached
            state.prefix_without_state += hit.num_without_state
            request.num_without_state = hit.num_without_state
    state.add_running(request)
    slot, loads = state.adapters.take(request)
    step.adapter_loads += loads
    step.starts.append(_row_start(request, slot))
    step.add(request, count)
    state.note_progress(request)
    return True


def _row_start(request: Request, adapter_slot: int) -> RowStart:
    source = request.engine_request
    # The worker may read the plan after more tokens have become known, so outputs are copied.
    token_ids = source.token_ids
    if len(request.token_ids) > request.num_prompt_tokens:
        token_ids = request.token_ids.copy()
    return RowStart(
        request.row,
        request.request_id,
        token_ids,
        request.num_prompt_tokens,
        request.num_computed_tokens,
        source.params,
        source.seed,
        source.eos_token_ids,
        source.prompt_embeds,
        adapter_slot,
    )
