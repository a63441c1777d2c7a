"""The core: pipelines steps, contains failing ones, and never stops because of one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from quire.engine.core import EngineCore
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.drafts import Drafter, Drafts
from quire.sched.scheduler import Scheduler
from quire.sched.shares import TokenShares
from quire.sched.state import Limits
from quire.sched.step_times import StepWork
from quire.types.errors import EngineDeadError
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from quire.worker.executor import Executor
from tests.fakes import FakeDrafter, FakeExecutor, FakeStep, FakeStepError, generate_alone

MAX_LEN = 64


class Device(Executor):
    """The checking fake as an executor; steps with a poisoned request raise."""

    def __init__(self, fake: FakeExecutor) -> None:
        self.fake = fake
        self.sticky = False
        self.unread = 0
        self.num_planned_ahead = 0

    def execute(self, plan: StepPlan) -> FakeStep:
        self.unread += 1
        self.num_planned_ahead = max(self.num_planned_ahead, self.unread)
        future = FakeStep()
        try:
            future.set_result(self.fake.execute(plan))
        except FakeStepError as error:
            future.set_exception(error)
        return future

    def is_sticky(self, error: Exception) -> bool:
        return self.sticky

    def shutdown(self) -> None:
        self.unread = 0


class Measured(TokenShares):
    """Remembers the durations of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.works: list[StepWork] = []

    def measured(self, work: StepWork, seconds: float) -> None:
        self.seconds.append(round(seconds, 6))
        self.works.append(work)


def make_core(
    steps_in_flight: int = 1,
    shares: TokenShares | None = None,
    clock: Callable[[], float] = time.monotonic,
    drafter: Drafter | None = None,
    layers: Sequence[LayerKV] = (LayerKV("full", None, 4),) * 2,
) -> tuple[EngineCore, Device]:
    layout = plan_layout(layers, 4)
    kv = KVCacheManager(layout, [65] * len(layout.pools), True)
    scheduler = Scheduler(
        Limits(max_num_seqs=8, max_num_batched_tokens=32, long_prefill_token_threshold=16, max_model_len=MAX_LEN),
        policy="fcfs",
        kv=kv,
        shares=shares,
        drafting=None if drafter is None else Drafts(drafter),
    )
    device = Device(FakeExecutor(layout, [65] * len(layout.pools), 8))
    return EngineCore(scheduler, device, steps_in_flight, clock=clock), device


def request(name: str, length: int = 5, max_tokens: int = 8) -> EngineRequest:
    token_ids = [hash((name, i)) % 40 for i in range(length)]
    return EngineRequest(
        request_id=name, token_ids=token_ids, params=SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens
    )


def run(core: EngineCore, device: Device) -> dict[str, EngineOutput]:
    """Step to the end; each request's tokens joined, with its last output's reason and error."""
    joined: dict[str, EngineOutput] = {}
    while core.has_work():
        for output in core.step().outputs:
            device.unread = 0
            before = joined.get(output.request_id)
            token_ids = [*(before.token_ids if before else []), *output.token_ids]
            joined[output.request_id] = msgspec.structs.replace(output, token_ids=token_ids)
        core.scheduler.check_integrity()
    return joined


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("right", [None, 0.0, 0.7, 1.0])
def test_plans_ahead_as_far_as_it_may_and_answers_the_same(depth: int, right: float | None) -> None:
    core, device = make_core(depth, drafter=None if right is None else FakeDrafter(right, 4, depth))
    requests = [request(str(i), 3 + 4 * i, 5 + i) for i in range(6)]
    for r in requests:
        assert core.add_request(r) == []
    outputs = run(core, device)
    for r in requests:
        assert outputs[r.request_id].token_ids == generate_alone(r, MAX_LEN)[0]
    assert device.num_planned_ahead >= min(depth, 2)
    if right:
        assert device.fake.num_accepted > 0
    elif right is None or depth == 1:  # behind drafts in flight that do not hold, a guess may be right by chance
        assert device.fake.num_accepted == 0
    assert core.scheduler.stats().num_free_blocks == core.scheduler.stats().num_blocks


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("right", [None, 0.7])
def test_a_failing_step_ends_only_the_culprit(depth: int, right: float | None) -> None:
    core, device = make_core(depth, drafter=None if right is None else FakeDrafter(right, 4, depth))
    requests = [request(str(i)) for i in range(4)]
    for r in requests:
        core.add_request(r)
    device.fake.poisoned = frozenset({"2"})
    outputs = run(core, device)
    assert outputs["2"].finish_reason == "error"
    assert outputs["2"].error == "FakeStepError: failed after the KV was written"
    for name in ("0", "1", "3"):
        assert outputs[name].token_ids == generate_alone(requests[int(name)], MAX_LEN)[0]
        assert outputs[name].finish_reason == "length"
    assert core.scheduler.stats().num_free_blocks == core.scheduler.stats().num_blocks


def test_a_lost_device_ends_the_engine() -> None:
    core, device = make_core()
    core.add_request(request("0"))
    device.fake.poisoned, device.sticky = frozenset({"0"}), True
    with pytest.raises(EngineDeadError, match=r"failed after.*restart"):
        core.step()


def test_a_request_that_can_never_run_is_answered_at_once() -> None:
    core, _ = make_core()
    (answer,) = core.add_request(request("long", length=MAX_LEN))
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert "max_model_len" in answer.error
    assert not core.has_work()


def test_every_step_tells_how_long_it_took_and_the_first_output_how_long_it_waited() -> None:
    core, _ = make_core()
    arrival = time.monotonic()
    core.add_request(msgspec.structs.replace(request("a", length=40, max_tokens=2), arrival_time=arrival))
    told = []
    while core.has_work():
        done = core.step()
        assert done.stats is not None
        assert 0 < done.stats.step_time <= time.monotonic() - arrival
        told += [output.queue_time for output in done.outputs]
    assert told[0] is not None
    assert 0 <= told[0] <= time.monotonic() - arrival
    assert told[1:] == [None]


def test_stats_come_also_when_an_abort_leaves_nothing_to_do() -> None:
    core, _ = make_core()
    core.add_request(request("a"))
    core.step()
    core.abort(["a"])
    stats = core.step().stats
    assert stats is not None
    assert (stats.num_running, stats.num_free_blocks, stats.step_time) == (0, stats.num_blocks, 0.0)


class Late(Device):
    """Steps run one after the other on a fake clock; a result comes when its step is done."""

    now = 0.0
    ends = 0.0
    launch = 0.0  # seconds that the host launches a step with more than one token, while it runs

    def execute(self, plan: StepPlan) -> FakeStep:
        future = super().execute(plan)
        self.now += 0.0001
        launch = self.launch if max(plan.num_tokens) > 1 else 0.0
        self.ends = end = max(self.now + launch, self.ends + 0.010, self.now + 0.010)
        self.now += launch
        done = future.result

        def result(timeout: float | None = None) -> StepResult:
            self.now = max(self.now, end)
            return done(timeout)

        future.result = result  # type: ignore[method-assign]
        return future


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_a_step_is_measured_without_those_it_waited_for(steps_in_flight: int) -> None:
    shares = Measured()
    core, device = make_core(steps_in_flight, shares, lambda: late.now)
    core.executor = late = Late(device.fake)
    core.add_request(request("a", 3, 6))
    while core.has_work():
        core.step()
        late.now += 0.002  # the loop does other things, too
    assert shares.seconds == [0.0101, *[0.01 if steps_in_flight > 1 else 0.0101] * 5]


def test_a_step_that_is_long_to_launch_has_its_time_and_not_the_one_before() -> None:
    """A decode step is done while the kernels of a prompt are launched, one by one."""
    shares = Measured()
    core, device = make_core(2, shares, lambda: late.now)
    core.executor = late = Late(device.fake)
    late.launch = 0.060
    core.add_request(request("a", 1, 12))
    for _ in range(4):
        core.step()
    core.add_request(request("b", 8, 2))
    while core.has_work():
        core.step()
    long = [work.prompt_tokens for work, seconds in zip(shares.works, shares.seconds, strict=True) if seconds > 0.011]
    assert long == [8]
    assert max(shares.seconds) == pytest.approx(0.06, abs=0.001)
