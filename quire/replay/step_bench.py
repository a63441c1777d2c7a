"""`quire bench steps`: measures how long steps of a model take here, by rows, tokens and context: a cost table."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.build import scheduler_setup
from quire.engine.core import EngineCore
from quire.engine.step_log import StepLog
from quire.replay.costs import CostTable, StepLoad, interpolated
from quire.replay.transport_bench import Outbox, message_times
from quire.replay.workload import simulated
from quire.types.control import LiveLimits
from quire.types.errors import BenchmarkError
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult
from quire.utils.phases import ignore_phase
from quire.worker.registry import DEFAULT_EXECUTOR, EXECUTORS

_PROMPT = 64  # tokens before rows that decode
_REPEATS = 4  # of a kind of step in a round; of fast steps as many as take `_SHORTEST`, up to `_MOST`
_SHORTEST, _MOST = 0.15, 30
_GROWTH = 48  # tokens that rows get while they are measured, at most
_WARM = 2  # first steps of a kind, which are not counted: kernels are loaded, graphs captured
_LONGEST = 1.0  # seconds for one kind of step in a round, unless one step takes longer
_TOGETHER = 8  # requests that come at once
_ALONE = 64  # tokens of a prompt that finds the device idle
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
_CONTEXTS = (512, 1024, 2048, 4096, 8192)
_CONTEXT_STEPS = 8  # prefill steps that rows with a long context may take
_ENDLESS = 1 << 20  # tokens; such requests are aborted


class _Step(NamedTuple):
    num_tokens: tuple[int, ...]  # of each row
    seconds: float
    host: float


class _Stopwatch(StepLog):
    """Keeps the time of every step, and of the host before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps: list[_Step] = []
        self._host: dict[int, float] = {}
        self._finished_at: float | None = None
        self._begun_at: float | None = None
        self.planning = 0.0
        """Seconds from the beginning of the last step to its first plan."""

    def begin(self, now: float) -> None:
        self._begun_at = now

    def planned(self, plan: StepPlan) -> None:
        now = self._clock()
        if self._begun_at is not None:
            self.planning, self._begun_at = now - self._begun_at, None
        self._host[plan.step_id] = 0.0 if self._finished_at is None else now - self._finished_at
        self._finished_at = None

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self.steps.append(_Step(tuple(plan.num_tokens), seconds, self._host.pop(plan.step_id)))
        self._finished_at = self._clock()


class StepBench:
    """Runs chosen steps on one engine."""

    def __init__(
        self, config: EngineConfig, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._say = say
        self._clock = clock
        self.executor = EXECUTORS.get(DEFAULT_EXECUTOR)(config, ignore_phase)
        self.setup = scheduler_setup(config, self.executor.description)
        if self.executor.description.pooler is not None:
            raise BenchmarkError("this model makes embeddings; steps are measured of models that generate")
        self._watch = _Stopwatch(clock)
        alone = replace(
            self.setup,
            step_time_target=0.0,
            caches_prefixes=False,
            speculative=None,
            long_prefill_token_threshold=self.setup.max_num_batched_tokens,
        )
        depth = self.setup.steps_in_flight
        self._core = EngineCore(alone.make_scheduler(), self.executor, depth, clock=clock, log=self._watch)
        self._draw = random.Random(0)
        self._outbox = Outbox()
        self._num_requests = 0
        self._samples: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
        self._mixed: list[tuple[StepLoad, float]] = []
        while self._core.capture_next():  # what a server does while it is idle
            pass

    def close(self) -> None:
        self.executor.shutdown()
        self._outbox.close()

    def machine_name(self, found: dict[str, Any]) -> str:
        """What to call this machine: by its device."""
        description = self.executor.description
        # Where kernels are compiled for instructions of a processor, that is what computes.
        on_host = bool(description.kernel_path["instruction_set"])
        return f"{found['cpu']}, {found['cores']} cores" if on_host else description.kernel_path["device"]

    def table(self, machine: str, model: str, environment: dict[str, Any], seconds: float) -> CostTable:
        """Measure every kind of step in rounds, for about `seconds`: a machine is not equally fast all the time."""
        rows = [count for count in _ROWS if count <= self.setup.max_num_seqs and self._fits(count, _PROMPT + _GROWTH)]
        sizes = self._sizes()
        begin, num_rounds = time.perf_counter(), 0
        while not num_rounds or (time.perf_counter() - begin) * (1 + 1 / num_rounds) < seconds:
            num_rounds += 1
            self._say(f"round {num_rounds}")
            self._round(rows, sizes)
        delivery, sending = message_times(self._request(_PROMPT, 1))
        table = CostTable(
            machine=machine,
            model=model,
            decode=[(count, self._typical("decode", count)) for count in rows],
            decode_context=_PROMPT + _WARM + _REPEATS // 2,
            prefill=[(count, self._typical("prefill", count)) for count in sizes],
            per_context=max(0.0, self._typical("context")),
            per_pair=max(0.0, self._typical("pair")),
            beside=0.0,
            host=[(count, self._typical("host", count)) for count in rows],
            delivery=delivery,
            sending=sending,
            admission=max(0.0, self._typical("admission")),
            setup=self.setup,
            environment=environment,
        )
        # Less than nothing is what the machine's pace did to two medians.
        beside = [max(0.0, seconds - table.seconds(load)) for load, seconds in self._mixed]
        idle = self._typical("alone") - interpolated(table.prefill, _ALONE) if self._samples["alone",] else 0.0
        return msgspec.structs.replace(
            table, beside=statistics.median(beside) if beside else 0.0, idle=max(0.0, idle)
        )

    def _sizes(self) -> list[int]:
        """Tokens of prompts that are measured: what steps are padded to, and where padding ends, are among them."""
        padded, budget = self.setup.step_sizes, self.setup.max_num_batched_tokens
        wanted = {*_TOKENS, *padded, *(size + 1 for size in padded[-1:]), budget}
        return sorted(size for size in wanted if size <= budget and self._fits(1, size + 1))

    def _round(self, rows: list[int], sizes: list[int]) -> None:
        for count in rows:
            steps = self._decode(count, _PROMPT)
            self._samples["decode", count] += [step.seconds for step in steps]
            self._samples["host", count] += [step.host for step in steps]
        if self.setup.steps_in_flight == 1:
            for size in sizes:
                self._samples["prefill", size] += self._prefill(size)
        else:
            self._prefill_beside(sizes)
        self._contexts(rows)
        self._chunks(sizes)
        self._beside(rows, sizes)
        self._admissions(rows)
        self._outbox.empty()

    def _admissions(self, rows: list[int]) -> None:
        """Seconds of the host for each of some requests that come at once, until their first step is planned."""
        count = min(rows[-1], _TOGETHER, self.setup.max_num_batched_tokens // _PROMPT)
        if not count:
            return
        for _ in range(_REPEATS):
            requests = [self._request(_PROMPT, 2) for _ in range(count)]
            begin = self._clock()
            for request in requests:
                self._core.add_request(request)
            taken = self._clock() - begin
            self._step()
            first = self._watch.planning
            while self._core.has_work():
                self._step()
            self._samples["admission",].append((taken + first) / count)

    def _typical(self, *kind: object) -> float:
        return statistics.median(self._samples[kind]) if self._samples[kind] else 0.0

    def _step(self) -> None:
        """A step of an engine process: its outputs are sent."""
        self._outbox.send(self._core.step())

    def _fits(self, rows: int, length: int) -> bool:
        needed = self.setup.layout.blocks_for(length, self.setup.max_num_batched_tokens)
        free = all(rows * count < there for count, there in zip(needed, self.setup.pool_blocks, strict=True))
        return free and length < self.setup.max_model_len

    @contextmanager
    def _running(self, rows: int, length: int) -> Iterator[None]:
        """Rows that decode, each with `length` tokens before; they are gone afterwards."""
        names = [self._submit(length, _ENDLESS) for _ in range(rows)]
        try:
            while self._core.scheduler.stats().num_prefilling or self._core.scheduler.num_waiting:
                self._step()
            yield
        finally:
            self._core.abort(names)
            while self._core.has_work():
                self._step()

    def _submit(self, length: int, max_tokens: int) -> str:
        request = self._request(length, max_tokens)
        for output in self._core.add_request(request):
            raise BenchmarkError(f"a step of {length} tokens cannot be measured: {output.error}")
        return request.request_id

    def _request(self, length: int, max_tokens: int) -> EngineRequest:
        self._num_requests += 1
        most = min(max_tokens, self.setup.max_model_len - length - 1)
        token_ids = self._draw.choices(range(min(4000, self.executor.description.vocab_size)), k=length)
        return simulated(f"bench-{self._num_requests}", token_ids, max(1, most))

    def _decode(self, rows: int, length: int) -> list[_Step]:
        self._say(f"decode, {rows} rows of {length} tokens")
        with self._running(rows, length):
            for _ in range(_WARM):
                self._step()
            self._watch.steps.clear()
            begin = time.perf_counter()
            while self._must_go_on(len(self._watch.steps), begin):
                self._step()
            return list(self._watch.steps)

    def _prefill(self, tokens: int) -> list[float]:
        """Seconds of steps with one prompt and nothing else."""
        self._say(f"prefill, {tokens} tokens")

        def one() -> float:
            self._submit(tokens, 1)
            self._watch.steps.clear()
            while self._core.has_work():
                self._step()
            return self._watch.steps[0].seconds

        return self._repeated(one, not self._samples["prefill", tokens])

    def _prefill_beside(self, sizes: list[int]) -> None:
        """Steps of these sizes, one token of each a row that decodes: the host prepares them while others run."""
        for size in sizes[1:]:
            self._say(f"prefill, {size} tokens beside another step")
            with self._running(1, _PROMPT):
                found = self._repeated(partial(self._mixed_step, size - 1), not self._samples["prefill", size])
            self._samples["prefill", size] += found
        self._samples["prefill", 1] = self._samples["decode", 1]
        if _ALONE in sizes:
            self._samples["alone",] += self._prefill(_ALONE)

    def _mixed_step(self, tokens: int) -> float:
        """Seconds of a step with a prompt of `tokens` tokens and the rows that decode."""
        name = self._submit(tokens, 1)
        self._watch.steps.clear()
        while name in self._core.scheduler.request_ids:
            self._step()
        return max(self._watch.steps, key=lambda step: max(step.num_tokens)).seconds

    def _repeated(self, measure: Callable[[], float], is_new: bool) -> list[float]:
        """What it measures some times; fewer if they take long."""
        for _ in range(_WARM if is_new else 1):
            measure()
        begin, found = time.perf_counter(), [measure()]
        while self._must_go_on(len(found), begin):
            found.append(measure())
        return found

    def _must_go_on(self, count: int, begin: float) -> bool:
        """Whether more samples are wanted of a kind, after `count` since `begin`."""
        seconds = time.perf_counter() - begin
        return not count or (count < _REPEATS and seconds < _LONGEST) or (count < _MOST and seconds < _SHORTEST)

    def _contexts(self, rows: list[int]) -> None:
        """Seconds for each token that is read: from the longest contexts that fit, and take few steps to compute."""
        count = rows[min(2, len(rows) - 1)]
        most = _CONTEXT_STEPS * self.setup.max_num_batched_tokens // count
        lengths = [length for length in _CONTEXTS if length <= most and self._fits(count, length + _GROWTH)]
        if lengths:
            short, long = (
                statistics.median(step.seconds for step in self._decode(count, length))
                for length in (_PROMPT, lengths[-1])
            )
            self._samples["context",].append((long - short) / (count * (lengths[-1] - _PROMPT)))

    def _chunks(self, sizes: list[int]) -> None:
        """Seconds for each pair of a prompt token and one of a chunk before it."""
        fitting = ((count, size) for size in reversed(sizes) for count in (4, 3) if self._fits(1, count * size + 1))
        num_chunks, size = next(fitting, (1, 1))
        if num_chunks == 1:
            return
        self._say(f"prefill, {num_chunks} chunks of {size} tokens")
        scheduler, limits = self._core.scheduler, self._core.scheduler.live_limits
        scheduler.set_limits(LiveLimits(max_num_batched_tokens=size))
        self._watch.steps.clear()
        self._submit(num_chunks * size, 1)
        while self._core.has_work():
            self._step()
        scheduler.set_limits(limits)
        first = self._watch.steps[0].seconds
        for number, step in enumerate(self._watch.steps[1:num_chunks], 1):
            self._samples["pair",].append((step.seconds - first) / (number * size * size))

    def _beside(self, rows: list[int], sizes: list[int]) -> None:
        """Steps of several rows that decode and a prompt."""
        count = rows[min(3, len(rows) - 1)]
        tokens = next((size for size in reversed(sizes) if size <= 8 * count), 1)
        if not self._fits(2 * count, tokens + 2 * _PROMPT) or count + tokens > self.setup.max_num_batched_tokens:
            return
        self._say(f"{count} rows that decode beside a prompt of {tokens} tokens")
        load = StepLoad(count, count * (_PROMPT + 2 * _REPEATS), tokens, ends=1)
        with self._running(count, _PROMPT):
            found = self._repeated(partial(self._mixed_step, tokens), not self._mixed)
        self._mixed += [(load, seconds) for seconds in found]
