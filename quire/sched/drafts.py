"""Drafts: guesses at what requests will say next, verified by the steps that sample it.

A draft holds exactly if it is the token that would be sampled without it, so drafts change how many tokens a step
gives and never which.
"""

from __future__ import annotations

from typing import Protocol

from quire.sched.request import Request
from quire.sched.state import SchedulerState, StepDraft


class NoDrafts:
    """Nobody speculates."""

    def add_drafts(self, state: SchedulerState, step: StepDraft) -> None:
        return None


class Drafter(Protocol):
    """Guesses tokens. A wrong guess costs the time to compute it, nothing else."""

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the known ones and those in flight, if all of these hold."""


class Drafts:
    """Rows that sample verify drafts with what is left of the step: nobody waits or is preempted for one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def add_drafts(self, state: SchedulerState, step: StepDraft) -> None:
        for index, request in enumerate(step.requests):
            limit = min(step.budget, request.max_tokens_total - request.num_tokens, state.kv.most_drafts)
            if index in step.chunks or request.pools or limit <= 0:
                continue
            drafts = self._drafter.propose(request, request.num_pending - 1, limit)
            assert len(drafts) <= limit
            drafts = drafts[: self._room(state, step, request, len(drafts))]
            if drafts:
                step.add_drafts(index, drafts)

    def _room(self, state: SchedulerState, step: StepDraft, request: Request, count: int) -> int:
        """Return how many of `count` drafts there are blocks for."""
        end = request.num_computed_tokens + count
        if end > request.capacity and state.kv.allocate(
            request.kv, request.num_certain_tokens, end, request.row, step.deltas, drafts=True
        ):
            request.capacity = state.kv.capacity(request.kv)
        return min(count, request.capacity - request.num_computed_tokens)
