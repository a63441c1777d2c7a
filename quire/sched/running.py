"""Planning the running requests: each gets some of the step's tokens to catch up with what it knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.sched.preempt import make_room
from quire.sched.request import Request, Status
from quire.sched.state import SchedulerState, StepDraft, order_key


def plan_running(state: SchedulerState, step: StepDraft, requests: Iterable[Request]) -> None:
    """Plan running requests in order. The common case, one token that its blocks have room for, is written out."""
    add_request, add_count = step.requests.append, step.num_tokens.append
    budget = step.budget
    num_behind = len(state.running)
    for request in requests:
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


def in_turn(state: SchedulerState) -> Iterator[Request]:
    """Running requests that a pipeline of several stages may compute in the next step, in order.

    Those whose last token is in flight wait for it: stages before the last know it once it has come back. Of those
    that decode, a step takes an even share, so that each stage has a batch.
    """
    running = state.running
    share = -(-(len(running) - len(state.prefilling)) // state.limits.num_stages)
    for request in list(running):
        if request.status is not Status.RUNNING or request.num_tokens > len(request.token_ids):
            continue
        if request.num_tokens - request.num_computed_tokens == 1:
            if not share:
                continue
            share -= 1
        yield request


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
