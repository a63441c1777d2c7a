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

    A step that computes a token of the step before it cannot begin until that is sampled. So of requests that decode
    a step takes an even share of those that the newest steps do not have, and only if there are none, of those that
    they have had for longest. A request with a mask or drafts waits for its token: it is planned by that.
    """
    running, num_stages = state.running, state.limits.num_stages
    newest = list(state.in_flight)[1 - num_stages :]
    age = {request: place for place, step in enumerate(newest, 1) for request in step.requests}
    decoding = [
        request
        for request in running
        if request.num_tokens - request.num_computed_tokens == 1
        and request.num_tokens < request.max_tokens_total
        and not (request.num_pending and (request.constrained or state.drafting.speculates(request)))
    ]
    oldest = min((age.get(request, 0) for request in decoding), default=0)
    share = -(-(len(running) - len(state.prefilling)) // num_stages)
    chosen = {*[request for request in decoding if age.get(request, 0) == oldest][:share]}
    for request in list(running):
        is_decoding = request.num_tokens - request.num_computed_tokens == 1
        if request.status is Status.RUNNING and (request in chosen or not is_decoding):
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
