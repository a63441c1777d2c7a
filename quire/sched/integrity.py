"""Whether the parts of a scheduler's state agree. For tests, and for idle engines in debug mode."""

from __future__ import annotations

from quire.sched.request import Status
from quire.sched.state import SchedulerState


def check_integrity(state: SchedulerState) -> None:
    """Raise AssertionError if queues, rows, blocks and steps in flight disagree. Slow."""
    running, waiting = state.running, list(state.waiting)
    assert running == sorted(running, key=lambda request: request.key), "running is out of order"
    assert {id(r) for r in running} | {id(r) for r in waiting} == {id(r) for r in state.requests.values()}
    assert len(running) + len(waiting) == len(state.requests), "a request is in two queues"
    assert all(request.status is Status.RUNNING for request in running)
    assert all(request.status is Status.WAITING for request in waiting)
    rows = [request.row for request in running] + state.rows.free
    assert sorted(rows) == list(range(state.limits.max_num_seqs)), "a row is lost or has two owners"
    assert state.num_constrained == sum(request.constrained for request in state.requests.values())
    pending = dict.fromkeys(state.requests, 0)
    uncertain = dict.fromkeys(state.requests, 0)
    for step in state.in_flight:
        for index, request in enumerate(step.requests):
            if request.status is Status.FINISHED:
                continue
            if index not in step.chunks:
                pending[request.request_id] += 1 + len(step.drafts.get(index, ()))
            if index not in step.chunks or step.chunks[index].num_preemptions == request.num_preemptions:
                uncertain[request.request_id] += step.plan.num_tokens[index]
    for request in state.requests.values():
        assert request.num_pending == pending[request.request_id], f"{request} has lost a token"
        assert request.num_computed_tokens <= request.capacity == state.kv.capacity(request.kv)
        if request.status is Status.RUNNING:
            certain = request.num_computed_tokens - uncertain[request.request_id]
            assert request.num_certain_tokens == certain, f"{request} is certain of {request.num_certain_tokens}"
        assert request.num_computed_tokens < request.num_tokens <= request.max_tokens_total
        assert bool(request.retry_until) == (request in state.retries)
        assert request.status is Status.RUNNING or request.row == -1
    wanting = {request for request in running if request.num_tokens - request.num_computed_tokens > 1}
    assert set(state.prefilling) == wanting, "a prompt is lost, or has ended"
    state.kv.check_integrity(request.kv for request in state.requests.values())
