"""Preemption by recompute: the last in order gives up its row and blocks, and later starts over from its tokens."""

from __future__ import annotations

from quire.sched.request import Request, Status
from quire.sched.state import SchedulerState, StepDraft


def make_room(state: SchedulerState, request: Request, end: int, step: StepDraft) -> bool:
    """Give a running request blocks for `end` tokens, preempting others if it must.

    Requests are planned in order of service and the last one is preempted first, so a victim is never in the
    step already. False when the request itself was the last: then it waits for its results in flight, after which
    blocks may have left its windows, or is preempted if there are none.
    """
    kv = state.kv
    while not kv.allocate(request.kv, request.num_certain_tokens, end, request.row, step.deltas):
        victim = state.running[-1]
        if victim is request and step.retry and len(state.running) > 1:
            victim = state.running[-2]
        step.out_of_blocks = True
        if victim is request:
            if request.num_certain_tokens == request.num_computed_tokens:
                preempt(state, request)
            return False
        preempt(state, victim)
    request.capacity = kv.capacity(request.kv)
    return True


def preempt(state: SchedulerState, request: Request) -> None:
    """Send a running request back to the waiting queue. Its tokens in flight still count when they arrive."""
    running = state.running
    if running[-1] is request:
        running.pop()
    else:
        running.remove(request)
    detach(state, request)
    state.waiting.push_back_in(request)
    state.num_preemptions += 1


def detach(state: SchedulerState, request: Request) -> None:
    """Take row and blocks from a running request, which keeps its tokens and its hashes."""
    state.kv.free(request.kv)
    state.rows.give_back(request.row)
    state.adapters.give_back(request)
    request.row = -1
    state.prefilling.pop(request, None)
    request.status = Status.WAITING
    request.steady = False
    request.num_computed_tokens = 0
    request.num_confirmed_tokens = 0
    request.capacity = 0
    request.num_preemptions += 1
