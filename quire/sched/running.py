"""Planning the running requests: each gets some of the step's tokens to catch up with what it knows."""

from __future__ import annotations

from quire.sched.preempt import make_room
from quire.sched.request import Request
from quire.sched.state import SchedulerState, StepDraft, order_key


def plan_running(state: SchedulerState, step: StepDraft) -> None:
    """Plan running requests in order. The common case, one token that its blocks have room for, is written out."""
    add_request, add_count = step.requests.append, step.num_tokens.append
    budget = step.budget
    num_behind = len(state.running)
    for request in state.running:
        num_behind -= 1
        num_tokens = request.num_tokens
        if num_tokens >= request.max_tokens_total:
            continue
        if budget == 0:
            break
        start = request.num_computed_tokens
        if num_tokens - start > 1:
            step.budget = budget
            count = state.shares.of_running(state, step, request, num_tokens - start, num_behind)
            if count and not plan_tokens(state, step, request, count):
                break
            budget = step.budget
        else:
            if start >= request.capacity and not make_room(state, request, num_tokens, step):
                break
            request.num_computed_tokens = num_tokens
            request.num_tokens = num_tokens + 1
            add_request(request)
            add_count(1)
            budget -= 1
    step.budget = budget


def plan_tokens(state: SchedulerState, step: StepDraft, request: Request, count: int) -> bool:
    """Plan `count` tokens of a running request. False when it had to be preempted for lack of blocks."""
    end = request.num_computed_tokens + count
    if end > request.capacity and not make_room(state, request, end, step):
        return False
    step.add(request, count)
    state.note_progress(request)
    return True


def plan_oldest_prompt(state: SchedulerState, step: StepDraft) -> None:
    """Plan a little of the first prompt in order: room was kept for waiting requests that could not start."""
    request = min(state.prefilling, key=order_key)
    wanted = request.num_tokens - request.num_computed_tokens
    plan_tokens(state, step, request, min(wanted, step.budget, state.kv.block_size))
