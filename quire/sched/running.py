"""Planning the running requests: each gets some of the step's tokens to catch up with what it knows."""

from __future__ import annotations

from quire.sched.preempt import make_room
from quire.sched.request import Request
from quire.sched.state import SchedulerState, StepDraft


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
            count = share_of_step(state, step, num_tokens - start, num_behind)
            if not plan_tokens(state, step, request, count):
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
    return True


def share_of_step(state: SchedulerState, step: StepDraft, wanted: int, num_behind: int) -> int:
    """How many tokens a request may compute that wants many: at least one, all if nobody else wants to run.

    Otherwise a long prompt is capped, and leaves a token for every running request behind it and, if the next
    waiting request is short, room for that one; so short requests keep flowing past several long ones.
    """
    waiting = state.waiting
    if step.retry or not (num_behind or step.requests or waiting):
        return min(wanted, step.budget)
    threshold = state.limits.long_prefill_token_threshold
    kept_back = num_behind
    if waiting and state.rows.free and waiting.peek().num_tokens <= threshold:
        kept_back += waiting.peek().num_tokens
    return max(1, min(wanted, threshold, step.budget - kept_back))
