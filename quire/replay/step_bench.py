"""`quire bench steps`: measures how long steps of a model take here, by rows, tokens and context: a cost table."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig
from quire.engine.build import scheduler_setup
from quire.engine.core import EngineCore
from quire.engine.step_log import StepLog
from quire.replay.costs import CostTable, monotone
from quire.replay.workload import simulated
from quire.types.errors import BenchmarkError
from quire.types.step import StepPlan, StepResult
from quire.utils.phases import ignore_phase
from quire.worker.registry import DEFAULT_EXECUTOR, EXECUTORS

_PROMPT = 64  # tokens before rows that decode
_REPEATS = 5
_WARM = 2  # steps of a kind that are not counted: kernels are loaded, graphs captured
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
_CONTEXTS = (512, 2048, 8192)
_ENDLESS = 1 << 20  # tokens; such requests are aborted


class _Step(NamedTuple):
    num_tokens: tuple[int, ...]  # of each row
    seconds: float
    host: float


class _Stopwatch(StepLog):
    """Keeps the time of every step, and of the host before it."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._host: dict[int, float] = {}
        self._finished_at: float | None = None

    def planned(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        self._host[plan.step_id] = 0.0 if self._finished_at is None else now - self._finished_at
        self._finished_at = None

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self.steps.append(_Step(tuple(plan.num_tokens), seconds, self._host.pop(plan.step_id)))
        self._finished_at = time.perf_counter()


class StepBench:
    """Runs chosen steps on one engine."""

    def __init__(self, config: EngineConfig, say: Callable[[str], None]) -> None:
        self._say = say
        self.executor = EXECUTORS.get(DEFAULT_EXECUTOR)(config, ignore_phase)
        self.setup = scheduler_setup(config, self.executor.description)
        if self.executor.description.pooler is not None:
            raise BenchmarkError("this model makes embeddings; steps are measured of models that generate")
        self._watch = _Stopwatch()
        alone = replace(
            self.setup,
            step_time_target=0.0,
            caches_prefixes=False,
            speculative=None,
            long_prefill_token_threshold=self.setup.max_num_batched_tokens,
        )
        self._core = EngineCore(alone.make_scheduler(), self.executor, self.setup.steps_in_flight, log=self._watch)
        self._draw = random.Random(0)
        self._num_requests = 0
        self._host: list[tuple[int, float]] = []
        while self._core.prepare():  # what a server does while it is idle
            pass

    def machine_name(self, found: dict[str, Any]) -> str:
        """What to call this machine: by its device."""
        description = self.executor.description
        # Where kernels are compiled for instructions of a processor, that is what computes.
        on_host = bool(description.kernel_path["instruction_set"])
        return f"{found['cpu']}, {found['cores']} cores" if on_host else description.kernel_path["device"]

    def table(self, machine: str, model: str, environment: dict[str, Any]) -> CostTable:
        budget, most_rows = self.setup.max_num_batched_tokens, self.setup.max_num_seqs
        rows = [count for count in _ROWS if count <= most_rows and self._fits(count, _PROMPT + 16)]
        decode = monotone([(count, self._decode(count, _PROMPT)) for count in rows])
        sizes = [count for count in (*_TOKENS, budget) if count <= budget and self._fits(1, count + 1)]
        prefill = monotone([(count, self._prefill(count)) for count in sorted(set(sizes))])
        return CostTable(
            machine=machine,
            model=model,
            decode=decode,
            decode_context=_PROMPT + _WARM + _REPEATS // 2,
            prefill=prefill,
            per_context=self._per_context(rows),
            per_pair=self._per_pair(sizes[-1]),
            shared=self._shared(rows, sizes),
            host=monotone(self._host),
            setup=self.setup,
            environment=environment,
        )

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
                self._core.step()
            yield
        finally:
            self._core.abort(names)
            while self._core.has_work():
                self._core.step()

    def _submit(self, length: int, max_tokens: int) -> str:
        self._num_requests += 1
        most = min(max_tokens, self.setup.max_model_len - length - 1)
        token_ids = self._draw.choices(range(100, 4000), k=length)
        request = simulated(f"bench-{self._num_requests}", token_ids, max(1, most))
        for output in self._core.add_request(request):
            raise BenchmarkError(f"a step of {length} tokens cannot be measured: {output.error}")
        return request.request_id

    def _decode(self, rows: int, length: int) -> float:
        self._say(f"decode, {rows} rows of {length} tokens")
        with self._running(rows, length):
            self._watch.steps.clear()
            while len(self._watch.steps) < _WARM + _REPEATS:
                self._core.step()
            counted = self._watch.steps[_WARM : _WARM + _REPEATS]
        if length == _PROMPT:
            self._host.append((rows, statistics.median(step.host for step in counted)))
        return statistics.median(step.seconds for step in counted)

    def _prefill(self, tokens: int) -> float:
        self._say(f"prefill, {tokens} tokens")
        times = []
        for _ in range(_WARM + (_REPEATS if tokens <= 1024 else 1)):
            self._watch.steps.clear()
            self._submit(tokens, 1)
            while self._core.has_work():
                self._core.step()
            times.append(self._watch.steps[0].seconds)
        return statistics.median(times[_WARM:])

    def _per_context(self, rows: list[int]) -> float:
        """Seconds for each token that is read: from the longest contexts that fit."""
        count = rows[min(3, len(rows) - 1)]
        lengths = [length for length in _CONTEXTS if self._fits(count, length + 16)]
        if not lengths:
            return 0.0
        longest, short = lengths[-1], self._decode(count, _PROMPT)
        return max(0.0, self._decode(count, longest) - short) / (count * (longest - _PROMPT))

    def _per_pair(self, budget: int) -> float:
        """Seconds for each pair of a prompt token and one of a chunk before it."""
        num_chunks = next((n for n in (4, 3, 2) if self._fits(1, n * budget + 1)), 1)
        if num_chunks == 1:
            return 0.0
        self._say(f"prefill, {num_chunks} chunks of {budget} tokens")
        self._watch.steps.clear()
        self._submit(num_chunks * budget, 1)
        while self._core.has_work():
            self._core.step()
        first, last = self._watch.steps[0].seconds, self._watch.steps[num_chunks - 1].seconds
        return max(0.0, last - first) / ((num_chunks - 1) * budget * budget)

    def _shared(self, rows: list[int], sizes: list[int]) -> float:
        """Part of the cheaper half that a step of both does not pay again."""
        count = rows[min(3, len(rows) - 1)]
        tokens = next((size for size in reversed(sizes) if size <= (sizes[-1] - count)), None)
        if tokens is None or not self._fits(2 * count, tokens + _PROMPT):
            return 0.0
        decode, prefill = self._decode(count, _PROMPT), self._prefill(tokens)
        self._say(f"{count} rows that decode beside a prompt of {tokens} tokens")
        found = []
        with self._running(count, _PROMPT):
            for _ in range(_REPEATS):
                self._watch.steps.clear()
                name = self._submit(tokens, 1)
                while name in self._core.scheduler.request_ids:
                    self._core.step()
                mixed = [step for step in self._watch.steps if max(step.num_tokens) == tokens]
                if mixed:
                    found.append((decode + prefill - mixed[0].seconds) / min(decode, prefill))
        return min(1.0, max(0.0, statistics.median(found))) if found else 0.0
