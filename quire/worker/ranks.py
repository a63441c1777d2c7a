"""RanksExecutor: an executor whose workers are other processes, one for each rank; the first that samples answers.

Knows what ranks are told and say; not where they run, nor how messages get there.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, EngineDeadError, EngineError, QuireError
from quire.types.masks import Masks
from quire.types.request import AdapterRef
from quire.types.step import Returned, StepPlan, StepResult
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase
from quire.worker import rank_messages as messages
from quire.worker.description import WorkerDescription
from quire.worker.executor import Executor

logger = get_logger(__name__)

TICK = 0.1  # seconds between two looks at the ranks
STILL_AFTER = 30  # ticks of ours without a heartbeat of a rank's, after which it stands still
_NOTHING: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)


class RankStepError(Exception):
    """A step failed on a rank."""

    def __init__(self, reason: str, *, is_sticky: bool) -> None:
        super().__init__(reason)
        self.is_sticky = is_sticky


class RankStep:
    def __init__(self, executor: RanksExecutor, step_id: int) -> None:
        self._executor, self._step_id = executor, step_id
        self._answer: StepResult | Exception | None = None

    def sample(self, masks: Future[Masks]) -> None:
        found = masks.result()
        self._executor.send(messages.Sample(len(found)), found.reshape(-1).view(np.uint8))

    def done(self) -> bool:
        return self._answer is not None or self._executor.has_answer(self._step_id)

    def exception(self) -> BaseException | None:
        if self._answer is None:
            self._answer = self._executor.wait_for(self._step_id)
        return self._answer if isinstance(self._answer, Exception) else None

    def result(self) -> StepResult:
        error = self.exception()
        if error is not None:
            raise error
        assert isinstance(self._answer, StepResult)
        return self._answer


class RanksExecutor(Executor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        """Takes what messages need; `_start` waits for the ranks."""
        parallel = config.parallel
        self.num_ranks = parallel.num_ranks
        self._answering_rank = parallel.answering_rank
        self._report = report
        self._is_pipeline = parallel.pipeline_parallel_size > 1
        self._returned: list[Returned] = []  # results that the stages before the last have not been given yet
        self._answers: dict[int, StepResult | Exception] = {}
        self._descriptions: dict[int, WorkerDescription] = {}
        self._prepared: list[bool] = []
        self._num_paused = 0
        self._must_pause = False
        self._knows_failure = False  # the engine: it has been given the answer of a step that failed
        self._adapters: dict[str, tuple[Future[int], list[messages.AdapterRead]]] = {}
        self._changing: tuple[messages.RankChange, Future[str], dict[int, messages.Changed]] | None = None
        self._pumping = threading.RLock()  # held by whoever takes messages in
        self._stopping = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="quire-ranks", daemon=True)

    @abstractmethod
    def _post(self, header: bytes, payload: NDArray[np.uint8]) -> None:
        """Send a message to all ranks."""

    @abstractmethod
    def _receive(self, limit: float) -> Iterator[tuple[int, messages.FromRank]]:
        """What ranks say; waits at most `limit` seconds. EngineDeadError, after its last words, if one is gone."""

    @abstractmethod
    def _look(self) -> None:
        """Call `_fail` if a rank is gone or stands still. Called once a tick.

        Ticks are counted, not seconds: when the machine stood still, so did we.
        """

    @abstractmethod
    def _end_ranks(self, reason: str) -> None:
        """End them at once. Does not block."""

    def _on_failed_step(self) -> None:
        """A rank said that its step failed: let none of the others wait for it."""

    @abstractmethod
    def _start_over(self) -> None:
        """All ranks rest after a failed step: collectives are as at the start."""

    @abstractmethod
    def _close(self) -> None:
        """Have all ranks leave, and give back what they were reached by."""

    def _start(self) -> None:
        """Wait until every rank has taken what it needs."""
        self._monitor.start()
        try:
            self._wait_until(lambda: len(self._descriptions) == self.num_ranks)
        except BaseException:
            self.shutdown()
            raise
        self.description = self._descriptions[self._answering_rank]
        self._check_alike()

    def _check_alike(self) -> None:
        """Ranks that pad steps in other ways would exchange tensors of other sizes."""
        mine = self.description
        for rank, other in self._descriptions.items():
            if (other.step_sizes, other.settings) != (mine.step_sizes, mine.settings):
                self.shutdown()
                raise EngineError(
                    f"rank {rank} runs steps in another way than rank {self._answering_rank}; they must run on like"
                    " machines"
                )

    def execute(self, plan: StepPlan) -> RankStep:
        if self._must_pause and self.failure is None:
            if not self._knows_failure:  # planned behind a step that failed: void, and those in flight have answers
                self._answers[plan.step_id] = RankStepError("a step before it failed", is_sticky=False)
                return RankStep(self, plan.step_id)
            self._pause()
        returned, self._returned = self._returned, []
        self.send(messages.Execute(plan, returned))
        return RankStep(self, plan.step_id)

    def capture_next(self) -> bool:
        if self.failure is not None:
            return False
        self._prepared.clear()
        self.send(messages.Prepare())
        try:
            self._wait_until(lambda: len(self._prepared) == self.num_ranks)
        except EngineError:
            return False  # the loop hears of it
        return any(self._prepared)

    def read_adapter(self, ref: AdapterRef) -> Future[int]:
        with self._pumping:
            if ref.digest not in self._adapters:
                self._adapters[ref.digest] = (Future(), [])
                self.send(messages.ReadAdapter(ref))
            future = self._adapters[ref.digest][0]
        if self.failure is not None and not future.done():
            future.set_exception(self.failure)
        return future

    def forget_adapter(self, digest: str) -> None:
        self.send(messages.ForgetAdapter(digest))

    def sleep(self, level: int) -> Future[str]:
        return self._change(messages.Sleep(level))

    def wake(self) -> Future[str]:
        return self._change(messages.Wake())

    def update_weights(self, path: str) -> Future[str]:
        """No rank lets its weights go before all have checked the others."""
        updated: Future[str] = Future()

        def update(checked: Future[str]) -> None:
            if checked.exception() is None:
                self._change(messages.UpdateWeights(path)).add_done_callback(tell)
            else:
                tell(checked)

        def tell(done: Future[str]) -> None:
            error = done.exception()
            if error is None:
                updated.set_result(done.result())
            else:
                updated.set_exception(error)

        self._change(messages.CheckWeights(path)).add_done_callback(update)
        return updated

    def _change(self, message: messages.RankChange) -> Future[str]:
        with self._pumping:
            self._returned.clear()  # nobody has a row for them
            self._changing = message, Future(), {}
            self.send(message)
            future = self._changing[1]
            if self.failure is not None and not future.done():
                future.set_exception(self.failure)
        return future

    def is_sticky(self, error: Exception) -> bool:
        return isinstance(error, EngineDeadError) or (isinstance(error, RankStepError) and error.is_sticky)

    def shutdown(self) -> None:
        self._stopping.set()
        if self._monitor.is_alive() and threading.current_thread() is not self._monitor:
            self._monitor.join()
        self._close()

    def send(self, message: messages.ToRank, payload: NDArray[np.uint8] = _NOTHING) -> None:
        """To all ranks, in this order for each. Nobody gets it any more once one has failed."""
        if self.failure is None:
            with suppress(EngineDeadError):
                self._post(msgspec.msgpack.encode(message), payload)

    def has_answer(self, step_id: int) -> bool:
        self._pump(0)
        return step_id in self._answers or self.failure is not None

    def wait_for(self, step_id: int) -> StepResult | Exception:
        try:
            self._wait_until(lambda: step_id in self._answers)
        except EngineError as error:
            return error
        answer = self._answers.pop(step_id)
        self._knows_failure |= isinstance(answer, Exception)
        return answer

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._check()
            self._pump(TICK)

    def _check(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(str(self.failure)) from self.failure

    def _pause(self) -> None:
        """After a failed step: have all ranks come to rest, so that none waits for another, and start over."""
        self._num_paused = 0
        self.send(messages.Pause())
        with suppress(EngineError):  # whoever waits for the step hears of it
            self._wait_until(lambda: self._num_paused == self.num_ranks)
        self._start_over()
        self._answers.clear()
        self._must_pause = self._knows_failure = False

    def _pump(self, limit: float) -> None:
        """Take in what ranks say; wait for it at most `limit` seconds."""
        with self._pumping:
            if self.failure is not None or self._stopping.is_set():
                return
            try:
                for rank, message in self._receive(limit):
                    self._take(rank, message)
            except EngineDeadError as error:
                self._fail(error)

    def _take(self, rank: int, message: messages.FromRank) -> None:
        match message:
            case messages.Done(result):
                if self._is_pipeline:
                    self._returned.append(Returned(result.step_id, result.token_ids, list(result.errors)))
                self._answers.setdefault(result.step_id, result)
            case messages.Failed(step_id, reason, is_sticky, is_echo):
                self._must_pause = True
                if is_sticky and is_echo:  # the step's answer may be another rank's already
                    self._fail(EngineDeadError(f"rank {rank}: {reason}"))
                if not is_echo or step_id not in self._answers:
                    self._answers[step_id] = RankStepError(f"rank {rank}: {reason}", is_sticky=is_sticky)
                self._on_failed_step()
            case messages.Described(description):
                self._descriptions[rank] = description
            case messages.Phase(name, progress):
                self._report(name, progress)
            case messages.Prepared(more):
                self._prepared.append(more)
            case messages.Paused():
                self._num_paused += 1
            case messages.AdapterRead():
                self._take_adapter(message)
            case messages.Changed():
                self._take_change(rank, message)
            case messages.Died(reason, is_permanent):
                self._fail(ConfigError(reason) if is_permanent else EngineDeadError(f"rank {rank}: {reason}"))

    def _take_adapter(self, read: messages.AdapterRead) -> None:
        future, said = self._adapters[read.digest]
        said.append(read)
        if len(said) < self.num_ranks:
            return
        del self._adapters[read.digest]
        error = next((one.error for one in said if one.error is not None), None)
        if error is not None:
            future.set_exception(EngineError(error))
        else:
            future.set_result(sum(one.num_bytes for one in said))

    def _take_change(self, rank: int, changed: messages.Changed) -> None:
        assert self._changing is not None, "no rank was told to change"
        message, future, said = self._changing
        said[rank] = changed
        if len(said) < self.num_ranks:
            return
        errors = {rank: one for rank, one in sorted(said.items()) if one.error is not None}
        if not errors and len({one.digest for one in said.values()}) == 1:
            future.set_result(changed.digest)
            return
        reason = "; ".join(f"rank {rank}: {one.error}" for rank, one in errors.items())
        reason = reason or "ranks have different files where the weights are"
        undone = len(errors) == self.num_ranks and not any(one.is_fatal for one in errors.values())
        if isinstance(message, messages.CheckWeights) or (isinstance(message, messages.UpdateWeights) and undone):
            future.set_exception(EngineError(reason))
        else:
            self._fail(EngineDeadError(reason))

    def _watch(self) -> None:
        """Look after the ranks while nobody waits for them, and find those that stand still."""
        while not self._stopping.wait(TICK):
            if self._pumping.acquire(blocking=False):
                try:
                    self._pump(0)
                finally:
                    self._pumping.release()
            if self.failure is None:
                self._look()

    def _fail(self, error: QuireError) -> None:
        """No rank can go on without the others."""
        if self.failure is not None or self._stopping.is_set():
            return
        logger.error("%s; ending all ranks", error)
        self.failure = error
        self._end_ranks(str(error))
        waiting: list[Future[int] | Future[str]] = [future for future, _ in self._adapters.values()]
        for future in [*waiting, *([] if self._changing is None else [self._changing[1]])]:
            if not future.done():
                future.set_exception(error)
        self.on_failure()


class Heart:
    """What the engine remembers of a rank's heartbeats."""

    def __init__(self) -> None:
        self.beats, self.still_for = 0, 0

    def look(self, beats: int) -> bool:
        """Once a tick: whether it has stood still for too long. A rank that has not begun is not judged."""
        self.still_for = self.still_for + 1 if beats == self.beats else 0
        self.beats = beats
        return beats > 0 and self.still_for >= STILL_AFTER
