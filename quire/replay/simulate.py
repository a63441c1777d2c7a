"""The real core, scheduler and KV manager before a device that only takes time: its clock is virtual. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from quire.engine.core import EngineCore
from quire.engine.setup import SchedulerSetup
from quire.engine.step_log import NO_LOG, StepLog
from quire.replay.costs import StepLoad
from quire.types.masks import Masks
from quire.types.outputs import EngineOutputs
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams
from quire.types.step import Pooled, StepPlan, StepResult
from quire.worker.executor import Executor

TOKEN = [7]  # what every row samples; nothing ends at it
_NOTHING: list[int] = []
_POOLED = Pooled(b"", (0,))


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Costs(Protocol):
    """Seconds that a step keeps the device, that the host takes until it looks for messages again, and messages."""

    def seconds(self, load: StepLoad) -> float: ...

    def host_seconds(self, rows: int) -> float: ...

    @property
    def idle(self) -> float: ...

    @property
    def delivery(self) -> float: ...

    @property
    def sending(self) -> float: ...

    @property
    def admission(self) -> float: ...


class SimulatedStep:
    """Done when the clock says so; to ask for its result is to wait until then."""

    __slots__ = ("_clock", "_end", "_result")

    def __init__(self, clock: Clock, end: float, result: StepResult) -> None:
        self._clock, self._end, self._result = clock, end, result

    def sample(self, masks: Future[Masks]) -> None:
        raise AssertionError("a simulation has no grammars")

    def done(self) -> bool:
        return self._end <= self._clock.now

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> StepResult:
        self._clock.now = max(self._clock.now, self._end)
        return self._result


class _Row:
    __slots__ = ("computed", "known", "pools")

    def __init__(self, known: int, computed: int, pools: bool) -> None:
        self.known, self.computed, self.pools = known, computed, pools


class SimulatedExecutor(Executor):
    """Runs plans one after the other on a device that takes as long as the costs say."""

    def __init__(self, costs: Costs, clock: Clock) -> None:
        self._costs = costs
        self._clock = clock
        self._rows: dict[int, _Row] = {}
        self._free_at = 0.0
        self._steady: list[int] = []  # rows of the last step, if all of them decoded
        self._steady_context = 0  # tokens that these rows have
        self._steady_steps = 0  # that these rows took, and that stand in none of them yet
        self.busy = 0.0

    def execute(self, plan: StepPlan) -> SimulatedStep:
        if not plan.starts and plan.rows == self._steady and max(plan.num_tokens) == 1:
            self._steady_steps += 1
            self._steady_context += len(plan.rows)
            load, token_ids, pooled = StepLoad(len(plan.rows), self._steady_context), [TOKEN] * len(plan.rows), None
        else:
            load, token_ids, pooled = self._run(plan)
        seconds = self._costs.seconds(load)
        if self._free_at <= self._clock.now:
            seconds += self._costs.idle
        begin = max(self._clock.now, self._free_at)
        self._free_at = begin + seconds
        self.busy += seconds
        result = StepResult(plan.step_id, token_ids, pooled=pooled) if pooled else StepResult(plan.step_id, token_ids)
        return SimulatedStep(self._clock, self._free_at, result)

    def is_sticky(self, error: Exception) -> bool:
        return True

    def shutdown(self) -> None:
        self._rows.clear()

    def _run(self, plan: StepPlan) -> tuple[StepLoad, list[list[int]], dict[int, Pooled] | None]:
        self._settle()
        rows = self._rows
        for row in plan.freed_rows:
            rows.pop(row, None)
        for start in plan.starts:
            pools = isinstance(start.params, PoolingParams)
            rows[start.row] = _Row(len(start.token_ids), start.num_computed_tokens, pools)
        token_ids: list[list[int]] = []
        pooled: dict[int, Pooled] = {}
        decoding = context = prompt_tokens = ends = 0
        pairs = 0.0
        for index, (row, count) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            state = rows[row]
            if count == 1 and state.computed == state.known - 1 and state.computed:
                decoding += 1
                context += state.known
            else:
                prompt_tokens += count
                pairs += count * state.computed
            state.computed += count
            if state.computed < state.known:
                token_ids.append(_NOTHING)
            elif state.pools:
                token_ids.append(_NOTHING)
                pooled[index] = _POOLED
            else:
                state.known += 1
                token_ids.append(TOKEN)
                ends += 1
        if not prompt_tokens:
            self._steady, self._steady_context = plan.rows, context
        return StepLoad(decoding, context, prompt_tokens, pairs, ends - decoding), token_ids, pooled or None

    def _settle(self) -> None:
        """Write down what the rows of steady steps have."""
        if self._steady_steps:
            for row in self._steady:
                self._rows[row].known += self._steady_steps
                self._rows[row].computed += self._steady_steps
        self._steady, self._steady_steps = [], 0


@dataclass(slots=True)
class SimulatedRequest:
    """One request, from when it is due to its last token."""

    request: EngineRequest
    due: float
    first: float | None = None
    last: float = 0.0
    num_outputs: int = 0
    refusal: str | None = None  # why it has no answer


class Watch(Protocol):
    """Who hears what a simulation sees."""

    def on_step(self, now: float, outputs: EngineOutputs, open_requests: dict[str, SimulatedRequest]) -> None: ...

    def on_end(self, ended: SimulatedRequest) -> None: ...


@dataclass
class Simulation:
    """`arrivals` gives each request and when it is due, in order; there are at most `max_concurrency` clients.

    A client sends its next request when it has read the end of the one before: the engine has begun a step meanwhile.
    Requests of the same moment are sent one after the other, so that an idle engine begins with the first of them.
    """

    setup: SchedulerSetup
    costs: Costs
    arrivals: Iterator[tuple[float, Callable[[], EngineRequest]]]
    max_concurrency: float = inf
    log: StepLog = NO_LOG
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.executor = SimulatedExecutor(self.costs, self.clock)
        plain = replace(self.setup, speculative=None)  # how many drafts would hold, a cost table does not know
        self.core = EngineCore(
            plain.make_scheduler(), self.executor, self.setup.steps_in_flight, clock=self.clock, log=self.log
        )
        self._open: dict[str, SimulatedRequest] = {}
        self._free_clients: list[float] = []  # since when each is free, of those that have sent something; a heap
        self._next = next(self.arrivals, None)
        self._may_send = 0.0  # when what was sent last has left

    def run(self, watch: Watch) -> float:
        """Run to the end; the virtual seconds that it took."""
        core, clock, requests = self.core, self.clock, self._open
        while self._next is not None or requests:
            self._admit(watch)
            if not core.has_work():
                if self._next is None:
                    break
                clock.now = max(clock.now, self._sent(self._next[0]) + self.costs.delivery)
                continue
            outputs = core.step()
            clock.now += self.costs.host_seconds(core.scheduler.num_running)
            now = clock.now + self.costs.delivery
            watch.on_step(now, outputs, requests)
            for output in outputs.outputs:
                one = requests[output.request_id]
                if output.token_ids or output.pooled is not None:
                    if one.first is None:
                        one.first = now
                    one.last = now
                    one.num_outputs += len(output.token_ids)
                if output.finish_reason is not None:
                    one.refusal = output.error
                    self._end(output.request_id, now, watch)
        return clock.now

    def _end(self, request_id: str, now: float, watch: Watch) -> None:
        watch.on_end(self._open.pop(request_id))
        if self.max_concurrency != inf:
            heappush(self._free_clients, now)

    def _sent(self, due: float) -> float:
        """When the next request is sent: when it is due and a client is free; inf if none is until another ends."""
        due = max(due, self._may_send)
        if len(self._open) + len(self._free_clients) < self.max_concurrency:
            return due
        return max(due, self._free_clients[0]) if self._free_clients else inf

    def _admit(self, watch: Watch) -> None:
        while self._next is not None:
            due, make = self._next
            sent = self._sent(due)
            if sent + self.costs.delivery > self.clock.now:
                return
            if self._free_clients and len(self._open) + len(self._free_clients) >= self.max_concurrency:
                heappop(self._free_clients)
            self._may_send = sent + self.costs.sending
            request = make()
            self.log.took(request)
            one = self._open[request.request_id] = SimulatedRequest(request, sent)
            for output in self.core.add_request(request):
                one.refusal = output.error
                self._end(output.request_id, self.clock.now, watch)
            self.clock.now += self.costs.admission  # others that come meanwhile are taken in too
            self._next = next(self.arrivals, None)
