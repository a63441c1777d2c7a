"""A scheduler before a device whose steps take known times on a fake clock: who waits how long, in no time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.scheduler import Scheduler
from quire.sched.shares import TokenShares
from quire.sched.state import Limits
from quire.sched.step_times import pairs_of
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Device:
    """Seconds of a step; `sizes`, if any, are what its tokens are padded to."""

    fixed: float
    per_row: float
    per_token: float
    per_pair: float
    sizes: tuple[int, ...] = ()
    weights: float = 0.0  # what reading the weights takes, while that is more than computing with them
    per_context: float = 0.0  # the same of what came before a prompt's tokens
    tile: int = 1  # queries that attention computes together

    def seconds(self, plan: StepPlan, computed: dict[int, int]) -> float:
        """`computed` are the tokens that each row had before the step."""
        chunks = [(computed[row], n) for row, n in zip(plan.rows, plan.num_tokens, strict=True) if n > 1]
        tokens = sum(n for _, n in chunks)
        rows = len(plan.rows) - len(chunks)
        if tokens:
            tokens = next((size for size in self.sizes if size >= rows + tokens), rows + tokens) - rows
        pairs = [(start, pairs_of(start, n, self.tile)) for start, n in chunks]
        attention = sum(max(self.per_context * start, self.per_pair * count) for start, count in pairs)
        linear = max(self.weights, self.per_token * tokens)
        return self.fixed + self.per_row * rows + linear + attention


# The default model on two cores, and Llama 8B on an H200 with recorded sizes, both roughly as measured.
CPU = Device(0.008, 0.002, 0.00095, 4e-7)
GPU = Device(0.005, 2e-5, 1.85e-5, 1.48e-9, (32, 64, 128, 192, 256, 384, 512, 768, 1024), tile=128)


@dataclass
class Life:
    due: float
    num_prompt_tokens: int
    times: list[float] = field(default_factory=list)  # of its tokens

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - time for time, later in pairs if begin <= time and later <= end]


class Simulation:
    def __init__(
        self,
        device: Device,
        shares: TokenShares | None,
        *,
        budget: int = 512,
        policy: str = "fcfs",
        depth: int = 1,
        max_num_seqs: int = 64,
        num_blocks: int = 40_000,
    ) -> None:
        self.scheduler = Scheduler(
            Limits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                long_prefill_token_threshold=budget // 2,
                max_model_len=200_000,
                query_tile=device.tile,
            ),
            policy=policy,
            kv=KVCacheManager(plan_layout([LayerKV("full", None, 1)], BLOCK_SIZE), num_blocks, False),
            shares=shares,
        )
        self.device, self.depth, self.budget = device, depth, budget
        self.now = 0.0
        self.lives: dict[str, Life] = {}
        self.plans: list[StepPlan] = []
        self._arrivals: deque[EngineRequest] = deque()
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # with the time it will be done
        self._computed: dict[int, int] = {}

    def add(self, name: str, due: float, num_prompt_tokens: int, num_outputs: int, **extra: Any) -> None:
        """Requests must be added in the order in which they are due."""
        params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
        self.lives[name] = Life(due, num_prompt_tokens)
        self._arrivals.append(
            EngineRequest(
                request_id=name,
                token_ids=[1] * num_prompt_tokens,
                params=params,
                max_tokens=num_outputs,
                arrival_time=due,
                **extra,
            )
        )

    def run(self, limit: int = 100_000) -> None:
        while self._arrivals or self.scheduler.has_unfinished:
            assert (limit := limit - 1), "no end in sight"
            if not self.scheduler.has_unfinished:
                self.now = max(self.now, self._arrivals[0].arrival_time)
            while self._arrivals and self._arrivals[0].arrival_time <= self.now:
                self.scheduler.add_request(self._arrivals.popleft())
            while len(self._in_flight) < self.depth and (plan := self.scheduler.schedule(self.now)) is not None:
                self._launch(plan)
            self._finish()

    def _launch(self, plan: StepPlan) -> None:
        assert sum(plan.num_tokens) <= self.budget
        for start in plan.starts:
            self._computed[start.row] = start.num_computed_tokens
        begin = max(self.now, self._in_flight[-1][1] if self._in_flight else 0.0)
        self._in_flight.append((plan, begin + self.device.seconds(plan, self._computed)))
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            self._computed[row] += count
        self.plans.append(plan)

    def _finish(self) -> None:
        plan, end = self._in_flight.popleft()
        seconds, self.now = end - self.now, end
        outputs = self.scheduler.update(plan, StepResult(plan.step_id, [[7] for _ in plan.rows]), seconds)
        for output in outputs:
            assert output.error is None, output.error
            self.lives[output.request_id].times += [self.now] * len(output.token_ids)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
