"""How the tokens of a step are shared between prompts: the rule by numbers of tokens, for throughput."""

from __future__ import annotations

from quire.sched.request import Request
from quire.sched.state import SchedulerState, StepDraft
from quire.sched.step_times import StepWork

MOST_PASSED = 64  # waiting requests, by one behind them: looking at each costs time in every step


class TokenShares:
    """Prompts in order of service, each as much as the step has room for, whatever time that takes.

    One token of every request that decodes is not the business of such a rule.
    """

    def begin(self, state: SchedulerState, step: StepDraft) -> None:
        """A step is about to be planned."""

    def of_running(
        self, state: SchedulerState, step: StepDraft, request: Request, wanted: int, num_behind: int
    ) -> int:
        """How many of the `wanted` tokens a running request gets; `num_behind` are later in order.

        At least one token, all if nobody else wants to run. Otherwise a long prompt is capped, and leaves a token for
        every running request behind it and, if the next waiting request is short, room for that one; so short
        requests keep flowing past several long ones.
        """
        waiting = state.waiting
        if not (num_behind or step.requests or waiting):
            return min(wanted, step.budget)
        threshold = state.limits.long_prefill_token_threshold
        kept_back = num_behind
        if waiting and state.rows.free and waiting.peek().num_tokens <= threshold:
            kept_back += waiting.peek().num_tokens
        return max(1, min(wanted, threshold, step.budget - kept_back))

    def may_start(self, state: SchedulerState, step: StepDraft, request: Request) -> bool:
        """Whether a waiting request is to be started in this step; if not, those behind it may be."""
        return True

    def most_passed(self) -> int:
        """How many waiting requests that may not start are looked at in this step before the others are let be."""
        return MOST_PASSED

    def of_new(self, state: SchedulerState, step: StepDraft, request: Request, start: int, wanted: int) -> int:
        """How many tokens, at least one, a request gets that begins with `start` cached tokens."""
        count = min(wanted, step.budget)
        if state.running or len(state.waiting) > 1:
            count = min(count, state.limits.long_prefill_token_threshold)
        return count

    def measured(self, work: StepWork, seconds: float) -> None:
        """A step with this work took `seconds`."""


class WholePrompts(TokenShares):
    """Every prompt in one step, as bidirectional attention needs it. A short prompt passes one that does not fit."""

    def may_start(self, state: SchedulerState, step: StepDraft, request: Request) -> bool:
        return request.num_tokens <= step.budget

    def of_new(self, state: SchedulerState, step: StepDraft, request: Request, start: int, wanted: int) -> int:
        return wanted
