"""Recorded runs of the real core over the checking fake, with any schedule of arrivals, aborts and failures."""

from __future__ import annotations

import random
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.config.groups import SpeculativeConfig
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.setup import SchedulerSetup
from quire.engine.step_log import StepLog
from quire.engine.trace.recorder import TraceRecorder, make_recorder
from quire.kv.layout import LayerKV, plan_layout
from quire.replay.steps import Comparison, ReplayedCore
from quire.replay.trace import Trace
from quire.sched.draft_lengths import EveryDraft, MeasuredLengths
from quire.sched.drafts import Drafts
from quire.sched.scheduler import Scheduler
from quire.sched.step_times import StepTimes
from quire.types.messages import AbortRequests, Command
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor
from tests.fakes import FakeDrafter, FakeExecutor, FakeStep, FakeStepError

LAYOUT = plan_layout([LayerKV("full", None, 4)] * 2, 4)
KERNEL_PATH = {"device": "cpu", "instruction_set": "avx2"}


def setup(draw: random.Random, depth: int | None = None) -> SchedulerSetup:
    return SchedulerSetup(
        max_num_seqs=draw.randint(1, 6),
        max_num_batched_tokens=draw.randint(6, 40),
        long_prefill_token_threshold=draw.randint(3, 6),
        policy=draw.choice(["fcfs", "priority"]),
        max_model_len=48,
        layout=LAYOUT,
        pool_blocks=(draw.randint(14, 40),),
        caches_prefixes=draw.random() < 0.7,
        takes_whole_prompts=False,
        step_time_target=draw.choice([0.0, 0.003]),
        performance_mode="balanced",
        step_times=(0.001, 0.001, 0.001, 1e-6),
        step_sizes=(),
        steps_in_flight=depth or draw.randint(1, 3),
        max_num_drafts=8,
        speculative=draw.choice([None, SpeculativeConfig(method="ngram", num_speculative_tokens=3)]),
    )


def make_scheduler(made: SchedulerSetup) -> Scheduler:
    """Where the setup speculates, a drafter that knows the fake model: most of its drafts hold."""
    scheduler = made.make_scheduler()
    if made.speculative is not None:
        lengths = EveryDraft() if made.max_num_seqs % 2 else MeasuredLengths(StepTimes())
        scheduler._state.drafting = Drafts(FakeDrafter(0.7, 3, seed=0), lengths=lengths)
    return scheduler


class Device(Executor):
    """The fake; `wrong` is a step whose first token is another one, `dies` one in which the process is lost."""

    def __init__(self, made: SchedulerSetup, poisoned: frozenset[str], wrong: int = -1, dies: int = -1) -> None:
        self.fake = FakeExecutor(made.layout, made.pool_blocks[0], made.max_num_seqs, poisoned=poisoned)
        self.wrong, self.dies = wrong, dies

    def execute(self, plan: StepPlan) -> FakeStep:
        step = FakeStep()
        if plan.step_id == self.dies:
            raise SystemExit("killed")
        try:
            result = self.fake.execute(plan)
        except FakeStepError as error:
            step.set_exception(error)
            return step
        if plan.step_id >= self.wrong >= 0 and any(result.token_ids):
            self.wrong = -1
            index = next(i for i, ids in enumerate(result.token_ids) if ids)
            result.token_ids[index][0] += 1
            result = StepResult(result.step_id, result.token_ids)
        step.set_result(result)
        return step

    def is_sticky(self, error: Exception) -> bool:
        return False

    def shutdown(self) -> None: ...


def request(draw: random.Random, name: str, logprobs: bool = False) -> EngineRequest:
    length, max_tokens = draw.randint(1, 20), draw.randint(1, 12)
    params = SamplingParams(max_tokens=max_tokens, logprobs=1 if logprobs else None)
    return EngineRequest(
        request_id=name,
        token_ids=[draw.choice((1, 2)) if i < 8 else draw.randrange(40) for i in range(length)],
        params=params,
        max_tokens=max_tokens,
        priority=draw.randint(0, 2),
    )


def recorder(path: Path, made: SchedulerSetup, **tracing: object) -> TraceRecorder:
    config = EngineConfig.from_flat(trace=str(path), **tracing)
    log = make_recorder(config, made, "digest", KERNEL_PATH)
    assert isinstance(log, TraceRecorder)
    return log


def record(
    seed: int,
    path: Path,
    *,
    num_requests: int = 8,
    dies: int = -1,
    depth: int | None = None,
    most_waiting: int = 1 << 30,
    **tracing: object,
) -> tuple[Trace, frozenset[str]]:
    """Record a random schedule; the trace, and the requests that make their steps fail."""
    draw = random.Random(seed)
    made = setup(draw, depth)
    poisoned = frozenset(f"r{i}" for i in range(num_requests) if draw.random() < 0.05)
    log = recorder(path, made, **tracing)
    core = EngineCore(make_scheduler(made), Device(made, poisoned, dies=dies), made.steps_in_flight, log=log)
    drive(core, draw, num_requests, most_waiting)
    return Trace(path), poisoned


def drive(core: EngineCore, draw: random.Random, num_requests: int, most_waiting: int = 1 << 30) -> None:
    """Let requests come, and some be aborted, at random moments; none comes while this many wait."""
    loop = EngineLoop(core)
    arrivals = [request(draw, f"r{i}", draw.random() < 0.2) for i in range(num_requests)]
    try:
        while arrivals or loop.has_unfinished():
            while arrivals and core.scheduler.num_waiting < most_waiting and draw.random() < 0.5:
                loop.submit(arrivals.pop(0))
            if draw.random() < 0.05:
                loop.submit(AbortRequests([f"r{draw.randrange(num_requests)}"]))
            if draw.random() < 0.02:
                loop.submit(Command(0, "reset_prefix_cache"))
            loop.run_once()
    except SystemExit:
        return
    loop.shutdown()


def core_for(trace: Trace, poisoned: frozenset[str] = frozenset(), **faults: int) -> MakeReplayed:
    return MakeReplayed(trace, poisoned, faults)


class MakeReplayed:
    def __init__(self, trace: Trace, poisoned: frozenset[str], faults: dict[str, int]) -> None:
        self._trace, self._poisoned, self._faults = trace, poisoned, faults

    def __call__(self, log: Comparison) -> ReplayedCore:
        made = self._trace.header.setup
        device = Device(made, self._poisoned, **self._faults)
        scheduler = self.scheduler = make_scheduler(made)
        return ReplayedCore(scheduler, device, made.steps_in_flight, log=log)

    def plain(self, log: StepLog | None = None) -> EngineCore:
        made = self._trace.header.setup
        return EngineCore(make_scheduler(made), Device(made, self._poisoned, **self._faults), made.steps_in_flight)
