"""The executor whose workers are processes on this host, one for each rank. The first that samples answers for all.

Messages to ranks are written once, into a ring in shared memory; a rank that dies or stands still fails the engine.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.config.env import child_environment, import_path, visible_devices
from quire.parallel.shared_memory import CollectiveFailure, RankMemory, SharedMemory
from quire.types.errors import ConfigError, EngineDeadError, EngineError, QuireError
from quire.types.masks import Masks
from quire.types.request import AdapterRef
from quire.types.step import Returned, StepPlan, StepResult
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase
from quire.worker.description import WorkerDescription
from quire.worker.executor import Executor
from quire.worker.rank_messages import (
    AdapterRead,
    Described,
    Died,
    Done,
    Execute,
    Failed,
    ForgetAdapter,
    FrameReader,
    FromRank,
    Pause,
    Paused,
    Phase,
    Prepare,
    Prepared,
    RankOrder,
    ReadAdapter,
    Sample,
    ToRank,
)
from quire.worker.ring import NOTICE, RingWriter, ring_bytes

logger = get_logger(__name__)

# -P: whatever lies in the current folder is not imported.
RANK_COMMAND = (sys.executable, "-P", "-m", "quire.worker.rank")
TICK = 0.1  # seconds between two looks at the ranks
STILL_AFTER = 30  # ticks of ours without a heartbeat of a rank's, after which it stands still
STOP_GRACE = 5.0  # seconds for ranks to leave
_NOTHING: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)


class RankStepError(Exception):
    """A step failed on a rank."""

    def __init__(self, reason: str, *, is_sticky: bool) -> None:
        super().__init__(reason)
        self.is_sticky = is_sticky


class RankProcess:
    """One rank, as its parent sees it."""

    def __init__(self, order: RankOrder, theirs: socket.socket, ours: socket.socket, device: str) -> None:
        self.rank = order.rank
        self._process = subprocess.Popen(
            RANK_COMMAND,
            stdin=subprocess.PIPE,
            env=child_environment(**import_path(), CUDA_VISIBLE_DEVICES=device),
            pass_fds=(order.socket_fd, order.ring_fd, order.collectives_fd),
        )
        theirs.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(order) + b"\n")
        self.socket, self.frames = ours, FrameReader()
        self.beats, self.still_for = 0, 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """How it ended, which it has or is about to."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.pid}) has closed its connection"
        if code == -signal.SIGKILL:
            return f"rank {self.rank} (process {self.pid}) was killed by SIGKILL: by hand, or because memory ran out"
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return f"rank {self.rank} (process {self.pid}) {how}"

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # whoever waits for an answer will hear that it is gone
            self.socket.sendall(data)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def leave(self, limit: float) -> None:
        """Blocks until it is gone, at most about `limit` seconds of its own accord."""
        self.socket.close()
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


class MultiProcStep:
    def __init__(self, executor: MultiProcExecutor, step_id: int) -> None:
        self._executor, self._step_id = executor, step_id
        self._answer: StepResult | Exception | None = None

    def sample(self, masks: Future[Masks]) -> None:
        found = masks.result()
        self._executor.send(Sample(len(found)), found.reshape(-1).view(np.uint8))

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


class MultiProcExecutor(Executor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        parallel = config.parallel
        size = parallel.num_ranks
        self._report = report
        self._ring_memory = SharedMemory(ring_bytes(size))
        self._memory = RankMemory(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._ring = RingWriter(self._ring_memory, size)
        self._failed_ranks = CollectiveFailure(self._memory.parts())
        self._is_pipeline = parallel.pipeline_parallel_size > 1
        self._returned: list[Returned] = []  # results that the stages before the last have not been given yet
        self._meeting = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self._selector = selectors.DefaultSelector()
        self._answers: dict[int, StepResult | Exception] = {}
        self._descriptions: dict[int, WorkerDescription] = {}
        self._prepared: list[bool] = []
        self._num_paused = 0
        self._must_pause = False
        self._adapters: dict[str, tuple[Future[int], list[AdapterRead]]] = {}
        self._pumping = threading.RLock()  # held by whoever takes messages in
        self._stopping = threading.Event()
        self.ranks = [self._launch(config, rank, size) for rank in range(size)]
        self._monitor = threading.Thread(target=self._watch, name="quire-ranks", daemon=True)
        self._monitor.start()
        try:
            self._wait_until(lambda: len(self._descriptions) == size)
        except QuireError:
            self.shutdown()
            raise
        self.description = self._descriptions[parallel.answering_rank]
        self._check_alike()

    def _launch(self, config: EngineConfig, rank: int, size: int) -> RankProcess:
        ours, theirs = socket.socketpair()
        order = RankOrder(
            config=config,
            rank=rank,
            size=size,
            socket_fd=theirs.fileno(),
            ring_fd=self._ring_memory.fd,
            collectives_fd=self._memory.fd,
            meeting=os.path.join(self._meeting.name, "store"),
        )
        devices = visible_devices()
        process = RankProcess(order, theirs, ours, devices[rank] if rank < len(devices) else str(rank))
        ours.setblocking(True)
        self._selector.register(ours, selectors.EVENT_READ, process)
        return process

    def _check_alike(self) -> None:
        """Ranks that pad steps in other ways would exchange tensors of other sizes."""
        mine = self.description
        for rank, other in self._descriptions.items():
            if (other.step_sizes, other.settings) != (mine.step_sizes, mine.settings):
                self.shutdown()
                raise EngineError(
                    f"rank {rank} runs steps in another way than rank 0; they must run on like machines"
                )

    def execute(self, plan: StepPlan) -> MultiProcStep:
        if self._must_pause and self.failure is None:
            self._pause()
        returned, self._returned = self._returned, []
        self.send(Execute(plan, returned))
        return MultiProcStep(self, plan.step_id)

    def prepare(self) -> bool:
        if self.failure is not None:
            return False
        self._prepared.clear()
        self.send(Prepare())
        try:
            self._wait_until(lambda: len(self._prepared) == len(self.ranks))
        except EngineError:
            return False  # the loop hears of it
        return any(self._prepared)

    def read_adapter(self, ref: AdapterRef) -> Future[int]:
        with self._pumping:
            if ref.digest not in self._adapters:
                self._adapters[ref.digest] = (Future(), [])
                self.send(ReadAdapter(ref))
            future = self._adapters[ref.digest][0]
        if self.failure is not None and not future.done():
            future.set_exception(self.failure)
        return future

    def forget_adapter(self, digest: str) -> None:
        self.send(ForgetAdapter(digest))

    def is_sticky(self, error: Exception) -> bool:
        return isinstance(error, EngineDeadError) or (isinstance(error, RankStepError) and error.is_sticky)

    def shutdown(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._monitor:
            self._monitor.join()
        deadline = time.monotonic() + STOP_GRACE
        self._selector.close()
        for process in self.ranks:
            process.socket.close()
        for process in self.ranks:
            process.leave(max(0.0, deadline - time.monotonic()))
        self._ring_memory.close()
        self._memory.close()
        self._meeting.cleanup()

    def send(self, message: ToRank, payload: NDArray[np.uint8] = _NOTHING) -> None:
        """To all ranks, in this order for each. Nobody gets it any more once one has failed."""
        if self.failure is not None:
            return
        header = msgspec.msgpack.encode(message)
        try:
            notice = self._ring.write(header, payload, self._check)
        except EngineDeadError:
            return
        if notice is None:
            notice = NOTICE.pack(-1, len(header), len(payload)) + header + payload.tobytes()
        for process in self.ranks:
            process.send(notice)

    def has_answer(self, step_id: int) -> bool:
        self._pump(0)
        return step_id in self._answers or self.failure is not None

    def wait_for(self, step_id: int) -> StepResult | Exception:
        try:
            self._wait_until(lambda: step_id in self._answers)
        except EngineError as error:
            return error
        return self._answers.pop(step_id)

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
        self.send(Pause())
        with suppress(EngineError):  # whoever waits for the step hears of it
            self._wait_until(lambda: self._num_paused == len(self.ranks))
        self._failed_ranks.forget()
        self._answers.clear()
        self._must_pause = False

    def _pump(self, limit: float) -> None:
        """Take in what ranks say; wait for it at most `limit` seconds."""
        with self._pumping:
            if self.failure is not None or self._stopping.is_set():
                return
            for key, _ in self._selector.select(limit):
                process: RankProcess = key.data
                try:
                    for message in process.frames.take(process.socket):
                        self._take(process.rank, message)
                except EOFError:
                    self._fail(EngineDeadError(process.end()))
                    return

    def _take(self, rank: int, message: FromRank) -> None:
        match message:
            case Done(result):
                if self._is_pipeline:
                    self._returned.append(Returned(result.step_id, result.token_ids, list(result.errors)))
                self._answers.setdefault(result.step_id, result)
            case Failed(step_id, reason, is_sticky, is_echo):
                self._must_pause = True
                if not is_echo or step_id not in self._answers:
                    self._answers[step_id] = RankStepError(f"rank {rank}: {reason}", is_sticky=is_sticky)
            case Described(description):
                self._descriptions[rank] = description
            case Phase(name, progress):
                self._report(name, progress)
            case Prepared(more):
                self._prepared.append(more)
            case Paused():
                self._num_paused += 1
            case AdapterRead():
                self._take_adapter(message)
            case Died(reason, is_permanent):
                self._fail(ConfigError(reason) if is_permanent else EngineDeadError(f"rank {rank}: {reason}"))

    def _take_adapter(self, read: AdapterRead) -> None:
        future, said = self._adapters[read.digest]
        said.append(read)
        if len(said) < len(self.ranks):
            return
        del self._adapters[read.digest]
        error = next((one.error for one in said if one.error is not None), None)
        if error is not None:
            future.set_exception(EngineError(error))
        else:
            future.set_result(sum(one.num_bytes for one in said))

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

    def _look(self) -> None:
        """Ticks are counted, not seconds: when the machine stood still, so did we."""
        for process, words in zip(self.ranks, self._ring.ranks, strict=True):
            beats = words.beats
            process.still_for = process.still_for + 1 if beats == process.beats else 0
            process.beats = beats
            if beats and process.still_for >= STILL_AFTER:
                still = f"rank {process.rank} (process {process.pid}) has stood still for {STILL_AFTER * TICK:g} s"
                self._fail(EngineDeadError(f"{still}; the engine cannot go on without it"))
                return
            if process.is_gone and process.still_for > 5:  # its last words have been read
                self._fail(EngineDeadError(process.end()))
                return

    def _fail(self, error: QuireError) -> None:
        """No rank can go on without the others."""
        if self.failure is not None or self._stopping.is_set():
            return
        logger.error("%s; ending all ranks", error)
        self.failure = error
        for process in self.ranks:
            process.kill()
        for future, _ in self._adapters.values():
            if not future.done():
                future.set_exception(error)
        self.on_failure()


def make_multiproc_executor(config: EngineConfig, report: ReportPhase) -> MultiProcExecutor:
    return MultiProcExecutor(config, report)
