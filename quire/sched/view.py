"""What the console is shown of the scheduler: each request with its phase, and why it waits. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from quire.sched.request import Request, Status
from quire.sched.state import SchedulerState
from quire.types.console import Phase, RequestView

MOST_WAITING = 200
"""Waiting requests that are shown."""


def request_views(state: SchedulerState, wall: Callable[[float], float]) -> list[RequestView]:
    """The running requests in order of service, then the next waiting ones; `wall` turns arrivals into wall time."""
    views = [view_request(state, request, "", wall) for request in state.running]
    for place, request in enumerate(state.waiting.first(MOST_WAITING)):
        views.append(view_request(state, request, why_waiting(state, request, place), wall))
    return views


def view_request(state: SchedulerState, request: Request, why: str, wall: Callable[[float], float]) -> RequestView:
    source = request.engine_request
    return RequestView(
        request.request_id,
        phase_of(request),
        wall(source.arrival_time),
        request.num_prompt_tokens,
        len(request.token_ids),
        request.num_computed_tokens,
        request.max_tokens_total,
        why,
        request.row,
        request.num_cached_tokens,
        request.capacity // state.kv.block_size,
        request.num_preemptions,
        source.priority,
        request.constrained,
    )


def phase_of(request: Request) -> Phase:
    if request.status is not Status.RUNNING:
        return "preempted" if request.num_preemptions else "queued"
    return "prefill" if request.num_tokens - request.num_computed_tokens > 1 else "decode"


def why_waiting(state: SchedulerState, request: Request, place: int) -> str:
    """In the order in which admission looks at it."""
    if state.retries:
        return f"a step failed: its {len(state.retries)} requests run alone first"
    if request.num_pending:
        return "its last tokens before the preemption are still in flight"
    if not state.rows.free:
        return f"all {state.limits.max_num_seqs} rows are taken (--max-num-seqs)"
    if not state.adapters.has_room(request):
        return "every adapter slot is in use (--max-loras)"
    first = state.waiting.peek()
    if state.blocked is not None and state.blocked == first.key:
        if place:
            return f"behind {first.request_id}, which waits for KV blocks"
        needed, _ = state.kv.needed_and_present(request.num_tokens, state.limits.max_num_batched_tokens)
        return f"needs {needed} KV blocks, {state.kv.num_free_blocks} of {state.kv.num_blocks} are free"
    if place:
        return f"{place} ahead of it in the queue"
    return "steps are full with prompts that began before" if state.prefilling else "starts with the next step"
