"""After a failed step: run its requests again, each alone, so that only the one that makes steps fail ends."""

from __future__ import annotations

from collections import Counter

from quire.sched.admission import admit
from quire.sched.preempt import detach, preempt
from quire.sched.request import Request, Status
from quire.sched.running import plan_tokens
from quire.sched.state import InFlight, SchedulerState, StepDraft, order_key
from quire.sched.update import reported
from quire.types.outputs import EngineOutput


def plan_retry(state: SchedulerState, step: StepDraft) -> None:
    """Plan the next request that is to run alone, once nothing else is in flight."""
    if state.in_flight:
        return
    step.retry = True
    request = state.retries[0]
    if request.status is Status.RUNNING:
        count = min(request.num_tokens - request.num_computed_tokens, step.budget)
        plan_tokens(state, step, request, count)
        return
    state.waiting.remove({request})
    while not (state.rows.free and admit(state, step, request)):
        preempt(state, state.running[-1])


def unwind(state: SchedulerState, failed: InFlight) -> None:
    """Undo the failed step and those planned after it: their requests start over, marked to run alone.

    The worker may or may not have applied the changes of these plans, so the rows they freed are freed again.
    """
    steps = [failed, *state.in_flight]
    state.in_flight.clear()
    hit = {request for step in steps for request in step.requests if request.status is not Status.FINISHED}
    # Alone they run without drafts.
    drafted = Counter(step.requests[index] for step in steps for index, tokens in step.drafts.items() for _ in tokens)
    for request in sorted(hit, key=order_key, reverse=True):
        is_running = request.status is Status.RUNNING
        reached = request.num_computed_tokens - drafted[request] if is_running else len(request.token_ids)
        request.retry_until = max(request.retry_until, reached)
        request.num_tokens = len(request.token_ids)
        if is_running:
            detach(state, request)
            state.waiting.push_back_in(request)
            state.num_preemptions += 1
    state.running = [request for request in state.running if request not in hit]
    for step in steps:
        state.adapters.forget(step.plan.adapter_loads)
    state.retries = sorted(hit.union(state.retries), key=order_key)
    told_in_vain = [row for step in steps for row in step.plan.freed_rows]
    state.rows.untold = list(dict.fromkeys(told_in_vain + state.rows.untold))


def fail_requests(state: SchedulerState, requests: list[Request], message: str) -> list[EngineOutput]:
    """End requests with an error."""
    # In their order, in which their blocks become free: a replay must plan with the same blocks.
    ended = [request for request in requests if request.status is not Status.FINISHED]
    outputs = [reported(one, EngineOutput(one.request_id, [], "error", error=message)) for one in ended]
    for request in ended:
        state.end(request)
    state.forget_finished(set(ended))
    return outputs
