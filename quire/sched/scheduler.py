"""The scheduler: decides which requests run in each step and how many tokens each computes.

Knows tokens, never text or tensors. Several steps may be planned before the first one's result is known; results
come back in the order of the plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.kv.manager import KVCacheManager
from quire.sched.adapters import NoAdapterSlots
from quire.sched.admission import admit_waiting, check_request
from quire.sched.drafts import NoDrafts
from quire.sched.integrity import check_integrity
from quire.sched.preempt import preempt
from quire.sched.queues import make_queue
from quire.sched.recovery import fail_requests, plan_retry, unwind
from quire.sched.request import Request
from quire.sched.running import in_turn, plan_oldest_prompt, plan_running
from quire.sched.shares import TokenShares, WholePrompts
from quire.sched.state import InFlight, Limits, SchedulerState, StepDraft
from quire.sched.update import apply_result, reported
from quire.types.control import LiveLimits
from quire.types.errors import ConfigError, EngineError
from quire.types.outputs import EngineOutput, EngineStats
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        *,
        policy: str,
        kv: KVCacheManager,
        shares: TokenShares | None = None,
        drafting: NoDrafts | None = None,
        adapters: NoAdapterSlots | None = None,
    ) -> None:
        """`shares` is how prompts share a step, None: by numbers of tokens alone; `drafting` who speculates."""
        self.kv = kv
        parts = (shares or TokenShares(), drafting or NoDrafts(), adapters or NoAdapterSlots())
        self._state = SchedulerState(limits, kv, make_queue(policy), *parts)
        self._most_tokens = limits.max_num_batched_tokens
        self._num_arrivals = 0
        self._next_step_id = 0

    def check(self, engine_request: EngineRequest) -> None:
        """RequestError if a request is a duplicate or could never run."""
        check_request(self._state, engine_request)

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request; RequestError if it is a duplicate or could never run."""
        state = self._state
        check_request(state, engine_request)
        key = state.waiting.order_key(engine_request.priority, self._num_arrivals)
        self._num_arrivals += 1
        request = Request(engine_request, state.kv.open(engine_request), key, state.limits.max_model_len)
        state.requests[request.request_id] = request
        state.num_constrained += request.constrained
        state.drafting.open(request)
        state.waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests at once, also while they are in flight. Unknown ids are ignored: they may just have ended."""
        return [reported(one, EngineOutput(one.request_id, [], "abort")) for one in self._drop(request_ids)]

    def finish(self, request_ids: Iterable[str]) -> None:
        """End requests whose last output has been made, also while they are in flight."""
        self._drop(request_ids)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to compute now. `now` is on the clock of arrival times."""
        state = self._state
        step = StepDraft(state.limits.max_num_batched_tokens, now, state.limits.query_tile)
        state.adapters.begin()
        if state.retries:
            plan_retry(state, step)
        else:
            state.shares.begin(state, step)
            plan_running(state, step, state.running if state.limits.num_stages == 1 else in_turn(state))
            admit_waiting(state, step)
            if not step.requests and state.prefilling:
                plan_oldest_prompt(state, step)
            state.drafting.add_drafts(state, step)
        return self._issue(step) if step.requests else None

    def update(self, plan: StepPlan, result: StepResult, seconds: float = 0.0) -> list[EngineOutput]:
        """Apply the result of the oldest plan in flight; `seconds` is how long it kept the device, 0 if unknown."""
        step = self._oldest(plan)
        outputs = apply_result(self._state, step, result)
        if seconds > 0.0:
            self._state.shares.measured(step.work, seconds)
        self._state.drafting.verified(self._state, step, result, seconds)
        self._state.step_tokens = step.work.num_tokens
        return outputs

    def recover(self, plan: StepPlan) -> None:
        """The oldest plan's execution raised: its requests, and those planned after it, run again, each alone.

        Plans after it are void, and not in flight any more. If it was a retry, call fail() instead.
        """
        unwind(self._state, self._oldest(plan))

    def fail(self, plan: StepPlan, message: str) -> list[EngineOutput]:
        """The oldest plan's execution raised and is not to be retried: its requests end, all others go on."""
        step = self._oldest(plan)
        unwind(self._state, step)
        return fail_requests(self._state, step.requests, message)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._state.requests)

    def work_ahead(self) -> None:
        """What can be done while the newest step runs: hash the prompts that began in it."""
        state = self._state
        if state.in_flight and state.in_flight[-1].plan.starts:
            for request in state.in_flight[-1].requests:
                state.kv.hash_ahead(request.kv, request.token_ids)

    @property
    def awaits_tokens(self) -> bool:
        """Whether every token of a request with drafts or masks is known when it is planned."""
        return self._state.limits.num_stages > 1

    @property
    def state(self) -> SchedulerState:
        """For those who look on and change nothing."""
        return self._state

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def request_ids(self) -> Iterable[str]:
        """Of all that are not finished."""
        return self._state.requests.keys()

    def stats(self, *, num_parked: int = 0, step_time: float = 0.0) -> EngineStats:
        """`num_parked` requests wait elsewhere; `step_time` is what the caller measured of the step before."""
        state = self._state
        return EngineStats(
            len(state.running),
            len(state.waiting) + num_parked,
            state.kv.num_blocks,
            state.kv.num_free_blocks,
            state.num_preemptions,
            state.prefix_queries,
            state.prefix_hits,
            state.step_tokens,
            step_time,
            prompt_tokens=state.prompt_tokens,
            num_prefilling=len(state.prefilling),
            prefill_tokens_left=sum(r.num_tokens - r.num_computed_tokens for r in state.prefilling),
            num_drafts=state.draft_counts.num_drafts,
            num_draft_tokens=state.draft_counts.num_draft_tokens,
            num_accepted_tokens=state.draft_counts.num_accepted_tokens,
            accepted_per_position=tuple(state.draft_counts.accepted_per_position),
            prefix_without_state=state.prefix_without_state,
        )

    def stand_down(self) -> None:
        """Every request gives up its row and its blocks, and nothing is cached; no step may be in flight."""
        state = self._state
        assert not state.in_flight, "a step would write into blocks that are somebody else's"
        while state.running:
            preempt(state, state.running[-1])
        state.adapters.clear()
        self.reset_prefix_cache()

    def use_weights(self, digest: str) -> None:
        """Blocks hold what these weights make, from now on; after `stand_down`."""
        self.kv.weights = digest
        for request in self._state.requests.values():
            request.kv = self.kv.open(request.engine_request)

    @property
    def live_limits(self) -> LiveLimits:
        return LiveLimits(self._state.max_running, self._state.limits.max_num_batched_tokens)

    def set_limits(self, limits: LiveLimits) -> None:
        """What runs goes on, until there are no more than the limit. ConfigError if the engine has no room for it."""
        state = self._state
        tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        for name, value, most in (
            ("max_num_seqs", seqs, state.limits.max_num_seqs),
            ("max_num_batched_tokens", tokens, self._most_tokens),
        ):
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name} is {value} but must be at least 1 and at most {most}, as at the start")
        if tokens is not None and tokens != self._most_tokens and isinstance(state.shares, WholePrompts):
            raise ConfigError("max_num_batched_tokens cannot change: this model takes prompts whole")
        state.max_running = state.max_running if seqs is None else seqs
        if tokens is not None:
            state.limits = replace(state.limits, max_num_batched_tokens=tokens)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that nobody uses."""
        self._state.kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, rows, blocks and steps in flight disagree. Slow: for tests."""
        check_integrity(self._state)

    def _issue(self, step: StepDraft) -> StepPlan:
        """Turn a draft into a plan, and remember it until its result comes."""
        state = self._state
        deltas, rows = step.deltas, [request.row for request in step.requests]
        plan = StepPlan(
            self._next_step_id,
            rows,
            step.num_tokens,
            state.rows.tell(),
            step.starts,
            deltas.rows,
            deltas.groups,
            deltas.indices,
            deltas.ids,
            {rows[index]: token_ids for index, token_ids in step.drafts.items()} if step.drafts else {},
            _mask_slots(step) if state.num_constrained else {},
            step.adapter_loads,
            {rows[index]: count for index, count in step.proposals.items()} if step.proposals else {},
        )
        self._next_step_id += 1
        state.in_flight.append(
            InFlight(
                plan, step.requests, step.chunks, step.drafts, step.retry, step.work, step.offers, step.predicted
            )
        )
        return plan

    def _drop(self, request_ids: Iterable[str]) -> list[Request]:
        """Take requests out of everything; unknown ids are ignored."""
        state = self._state
        known = (state.requests.get(request_id) for request_id in dict.fromkeys(request_ids))
        dropped = [request for request in known if request is not None]
        for request in dropped:
            state.end(request)
        if dropped:
            state.forget_finished(set(dropped))
        return dropped

    def _oldest(self, plan: StepPlan) -> InFlight:
        """Take the oldest step in flight, which must be this plan's."""
        in_flight = self._state.in_flight
        if not in_flight or in_flight[0].plan.step_id != plan.step_id:
            expected = in_flight[0].plan.step_id if in_flight else "none"
            raise EngineError(f"step {plan.step_id} came back out of order; the oldest in flight is {expected}")
        return in_flight.popleft()


def _mask_slots(step: StepDraft) -> dict[int, int]:
    """The rows that sample under a grammar, each with the line of its first mask: it has one per sample position."""
    slots, num_lines = {}, 0
    for index, request in enumerate(step.requests):
        if request.constrained and index not in step.chunks:
            slots[request.row] = num_lines
            num_lines += 1 + len(step.drafts.get(index, ()))
    return slots
