"""Drives a scheduler with a FakeExecutor: some steps in flight, integrity checked after every call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.adapters import AdapterSlots
from quire.sched.drafts import Drafter, Drafts, NoDrafts
from quire.sched.preempt import preempt
from quire.sched.scheduler import Scheduler
from quire.sched.shares import TokenShares
from quire.sched.state import Limits
from quire.sched.step_times import StepTimes
from quire.sched.time_shares import make_shares
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.step import StepPlan
from tests.fakes import FakeExecutor, FakeStepError

FULL = (LayerKV("full", None, 1),)


def make_request(
    name: str,
    token_ids: Iterable[int],
    max_tokens: int = 4,
    params: SamplingParams | PoolingParams | None = None,
    **extra: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=list(token_ids),
        params=SamplingParams(max_tokens=None) if params is None else params,
        max_tokens=max_tokens,
        **extra,
    )


class Driver:
    """The least an engine does: schedule up to `depth` steps, execute them in order, hand results back."""

    def __init__(
        self,
        *,
        layers: Sequence[LayerKV] = FULL,
        block_size: int = 4,
        num_blocks: int | Sequence[int] = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        threshold: int | None = None,
        policy: str = "fcfs",
        max_model_len: int = 64,
        prefix_caching: bool = True,
        depth: int = 1,
        step_time: float = 0.0,
        drafter: Drafter | None = None,
        adapter_slots: int = 1,
        drafting: NoDrafts | None = None,
        num_stages: int = 1,
        shares: TokenShares | None = None,
    ) -> None:
        """`step_time`: the target of the rule that shares steps by time; 0: by tokens. Measured times are made up."""
        layout = plan_layout(layers, block_size)
        self.kv = KVCacheManager(layout, num_blocks, prefix_caching)
        self.scheduler = Scheduler(
            Limits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                long_prefill_token_threshold=budget if threshold is None else threshold,
                max_model_len=max_model_len,
                num_stages=num_stages,
            ),
            policy=policy,
            kv=self.kv,
            shares=shares or make_shares(step_time, "balanced", StepTimes()),
            adapters=AdapterSlots(((16, adapter_slots),)),
            drafting=drafting if drafter is None else Drafts(drafter),
        )
        self.executor = FakeExecutor(layout, num_blocks, max_num_seqs)
        self.budget = budget
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            if request.adapter is not None:
                self.executor.adapters[request.request_id] = request.adapter.digest
            self.outputs[request.request_id] = []
        self.scheduler.check_integrity()

    def abort(self, *names: str) -> None:
        self._collect(self.scheduler.abort(names))

    def preempt_last(self) -> None:
        """Preempt as if blocks had run out."""
        state = self.scheduler._state
        if state.running and not state.retries:
            preempt(state, state.running[-1])
        self.scheduler.check_integrity()

    @property
    def has_schedulable(self) -> bool:
        """Whether something could be planned now, if there are blocks for it."""
        state = self.scheduler.state
        if state.retries:
            return not state.in_flight
        if any(r.num_computed_tokens < r.num_tokens < r.max_tokens_total for r in state.running):
            return True
        return bool(state.waiting) and state.has_row and not state.waiting.peek().num_pending

    def plan(self) -> StepPlan | None:
        """Plan one step and put it in flight."""
        schedulable = self.has_schedulable
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            return None
        assert schedulable, "a step was planned though nothing was schedulable"
        if self.scheduler.awaits_tokens:
            steps = self.scheduler.state.in_flight
            sampling = [
                request
                for step in steps
                for index, request in enumerate(step.requests)
                if index not in step.chunks
                and (request.constrained or self.scheduler.state.drafting.speculates(request))
            ]
            assert len(set(sampling)) == len(sampling), "a request was planned before its token came back"
        assert sum(plan.num_tokens) <= self.budget
        self.in_flight.append(plan)
        self.plans.append(plan)
        return plan

    def finish(self, *, fail: bool = False, apply_before_failing: bool = False) -> None:
        """Execute the oldest step in flight and hand its result, or its failure, to the scheduler."""
        plan = self.in_flight.popleft()
        try:
            result = self.executor.execute(plan, fail=fail, apply_before_failing=apply_before_failing)
        except FakeStepError as error:
            self.in_flight.clear()
            if self.scheduler.state.in_flight[0].retry:
                self._collect(self.scheduler.fail(plan, str(error)))
            else:
                self.scheduler.recover(plan)
        else:
            seconds = 0.001 * (plan.step_id * 37 % 50)
            self._collect(self.scheduler.update(plan, result, seconds))
            assert self.scheduler.stats().step_tokens == sum(plan.num_tokens)
        self.scheduler.check_integrity()

    def step(self) -> None:
        while len(self.in_flight) < self.depth and self.plan() is not None:
            pass
        assert self.in_flight, "unfinished requests, but nothing can be planned"
        self.finish()

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "no end in sight"
        while self.in_flight:
            self.finish()
        assert self.kv.num_free_blocks == self.kv.num_blocks

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def ending(self, name: str) -> tuple[list[int], str | None, int | None]:
        last = self.outputs[name][-1]
        return self.tokens(name), last.finish_reason, last.stop_reason

    def _collect(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            mine = self.outputs[output.request_id]
            assert not (mine and mine[-1].finish_reason), "an output after the last one"
            assert (output.num_cached_tokens >= 0) <= (not mine), "cached tokens are told once, first"
            mine.append(output)
        self.scheduler.check_integrity()
