"""How the tokens of a step are shared between prompts: the rule by numbers of tokens, for throughput."""

from __future__ import annotations

from quire.sched.request import Request
from quire.sched.state import SchedulerState, StepDraft
from quire.sched.step_times import StepWork

MOST_PASSED = 64  # waiting requests, by one behind them: looking at each costs time in every step


class TokenShares:
    """Prompts in order of service, each as much as the step has room for, whatever time that takes."""

    def begin(self, state: SchedulerState, step: StepDraft) -> None:
        return None

    def of_running(
        self, state: SchedulerState, step: StepDraft, request: Request, wanted: int, num_behind: int
    ) -> int:
        """At least one token, all if nobody else wants to run.

        Otherwise a long prompt is capped, and leaves a token for every running request behind it and, if the next
        waiting request is short, room for that one; so short requests keep flowing past several long ones.
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
        return True

    def most_passed(self) -> int:
        return MOST_PASSED

    def of_new(self, state: SchedulerState, step: StepDraft, request: Request, start: int, wanted: int) -> int:
        count = min(wanted, step.budget)
        if state.running or len(state.waiting) > 1:
            count = min(count, state.limits.long_prefill_token_threshold)
        return count

    def measured(self, work: StepWork, seconds: float) -> None:
        return None


class WholePrompts(TokenShares):
    """Every prompt in one step, as bidirectional attention needs it. A short prompt passes one that does not fit."""

    def may_start(self, state: SchedulerState, step: StepDraft, request: Request) -> bool:
        return request.num_tokens <= step.budget

    def of_new(self, state: SchedulerState, step: StepDraft, request: Request, start: int, wanted: int) -> int:
        return wanted
