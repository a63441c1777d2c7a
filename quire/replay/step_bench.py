"""`quire bench steps`: measures how long steps of a model take here, by rows, tokens and context: a cost table."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.engine.build import scheduler_setup
from quire.engine.core import EngineCore
from quire.engine.step_log import StepLog
from quire.engine.transport import Receiver, Sender, make_meeting
from quire.replay.costs import CostTable, StepLoad, monotone
from quire.replay.workload import simulated
from quire.types.errors import BenchmarkError
from quire.types.outputs import EngineOutputs
from quire.types.step import StepPlan, StepResult
from quire.utils.phases import ignore_phase
from quire.worker.registry import DEFAULT_EXECUTOR, EXECUTORS

_PROMPT = 64  # tokens before rows that decode
_REPEATS = 5
_WARM = 2  # steps of a kind that are not counted: kernels are loaded, graphs captured
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
_CONTEXTS = (512, 2048, 8192)
_MESSAGES = 200
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

    def planned(self, plan: StepPlan) -> None:
        now = self._clock()
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
        self._encode = msgspec.msgpack.Encoder().encode
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
        table = CostTable(
            machine=machine,
            model=model,
            decode=decode,
            decode_context=_PROMPT + _WARM + _REPEATS // 2,
            prefill=prefill,
            per_context=self._per_context(rows),
            per_pair=self._per_pair(sizes[-1]),
            beside=0.0,
            host=monotone(self._host),
            delivery=self._delivery(),
            setup=self.setup,
            environment=environment,
        )
        return msgspec.structs.replace(table, beside=self._beside(table))

    def _step(self) -> None:
        """A step of an engine process: its outputs are sent."""
        self._encode(self._core.step())

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
        self._num_requests += 1
        most = min(max_tokens, self.setup.max_model_len - length - 1)
        token_ids = self._draw.choices(range(min(4000, self.executor.description.vocab_size)), k=length)
        request = simulated(f"bench-{self._num_requests}", token_ids, max(1, most))
        for output in self._core.add_request(request):
            raise BenchmarkError(f"a step of {length} tokens cannot be measured: {output.error}")
        return request.request_id

    def _decode(self, rows: int, length: int) -> float:
        self._say(f"decode, {rows} rows of {length} tokens")
        with self._running(rows, length):
            self._watch.steps.clear()
            while len(self._watch.steps) < _WARM + _REPEATS:
                self._step()
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
                self._step()
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
            self._step()
        first, last = self._watch.steps[0].seconds, self._watch.steps[num_chunks - 1].seconds
        return max(0.0, last - first) / ((num_chunks - 1) * budget * budget)

    def _beside(self, table: CostTable) -> float:
        """Seconds that rows that decode and prompts take more in one step than `table` adds them up to."""
        count = table.decode[min(3, len(table.decode) - 1)][0]
        tokens = next((size for size, _ in reversed(table.prefill) if size <= 8 * count), 1)
        if not self._fits(2 * count, tokens + 2 * _PROMPT) or count + tokens > self.setup.max_num_batched_tokens:
            return 0.0
        self._say(f"{count} rows that decode beside a prompt of {tokens} tokens")
        found = []
        with self._running(count, _PROMPT):
            for number in range(_WARM + _REPEATS):
                self._watch.steps.clear()
                name = self._submit(tokens, 1)
                while name in self._core.scheduler.request_ids:
                    self._step()
                mixed = next(step for step in self._watch.steps if max(step.num_tokens) == tokens)
                load = StepLoad(count, count * (_PROMPT + 2 * number + 2), tokens, ends=1)
                found.append(mixed.seconds - table.seconds(load))
        return statistics.median(found[_WARM:])

    def _delivery(self) -> float:
        """Half of what a message takes to another thread and back, over the transport of an engine."""
        meeting, message = make_meeting(), EngineOutputs([])
        decoder = msgspec.msgpack.Decoder(EngineOutputs)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        here, there = (
            Receiver(context, address, meeting.token, decoder) for address in (meeting.client, meeting.engine)
        )
        to_there, to_here = (Sender(context, one.endpoint, meeting.token) for one in (there, here))

        def echo() -> None:
            for _ in range(_MESSAGES):
                there.socket.poll()
                while (got := there.receive()) is None:
                    there.socket.poll()
                to_here.send(got)

        times = []
        thread = threading.Thread(target=echo)
        thread.start()
        for _ in range(_MESSAGES):
            begin = time.perf_counter()
            to_there.send(message)
            while here.receive() is None:
                here.socket.poll()
            times.append(time.perf_counter() - begin)
        thread.join()
        for end in (to_there, to_here, here, there):
            end.close()
        context.term()
        meeting.remove()
        return statistics.median(times) / 2
