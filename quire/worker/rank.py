"""One rank of several, and the program of one on the engine's host: `python -m quire.worker.rank`.

The main thread takes orders and runs steps. A second one counts heartbeats and ends the process when its parent is
gone; it waits for no step, so that a long step is no hang.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.config.env import log_level
from quire.parallel.collectives import Failure
from quire.parallel.connect import connect
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.parallel.shared_memory import CollectiveFailure, RankMemory, SharedMemory
from quire.platform.base import Platform
from quire.platform.registry import get_platform
from quire.types.errors import EngineDeadError, EngineError, QuireError
from quire.types.masks import Masks
from quire.types.step import StepPlan
from quire.utils.collector import paused_collector
from quire.utils.log import get_logger, setup_logging
from quire.utils.streams import receive_exactly
from quire.worker import rank_messages as messages
from quire.worker.inproc import InProcExecutor, InProcStep
from quire.worker.ring import NOTICE, RingReader, ring_bytes
from quire.worker.worker import Worker

logger = get_logger("quire.worker.rank")  # not __main__

BEAT_EVERY = 0.2  # seconds


def keep_beating(beat: Callable[[], None], parent: int, stopped: threading.Event) -> None:
    """Count heartbeats; without its parent the process ends at once, even where a step waits for other ranks."""
    while True:
        beat()
        if stopped.wait(BEAT_EVERY):
            return
        if os.getppid() != parent:
            os._exit(1)


class RankChannel(ABC):
    """How a rank hears from its engine and speaks to it."""

    failure: Failure
    """Whether a rank has failed, so that the others wait for it no longer."""

    @abstractmethod
    def connect(self, platform: Platform) -> tuple[ParallelGroup, Pipeline]:
        """The place of this rank among the others. Waits for them."""

    @abstractmethod
    def has_order(self) -> bool: ...

    @abstractmethod
    def take_order(self, obey: Callable[[messages.ToRank, NDArray[np.uint8]], None]) -> None:
        """Wait for a message; `obey` gets it and its payload, which is gone afterwards. EOFError at the end."""

    @abstractmethod
    def send(self, message: messages.FromRank) -> None:
        """From any thread."""


class LocalChannel(RankChannel):
    """A socket, and the engine's ring in shared memory."""

    def __init__(self, order: messages.RankOrder) -> None:
        self._order = order
        self._socket = socket.socket(fileno=order.socket_fd)
        self._send_lock = threading.Lock()  # adapters are read on a thread of their own
        self._ring = RingReader(SharedMemory(ring_bytes(order.size), order.ring_fd), order.rank, order.size)
        parallel = order.config.parallel
        self._memory = RankMemory(*parallel.sizes, order.collectives_fd)
        self.failure = CollectiveFailure(self._memory.parts())
        self.beat = self._ring.words.beat

    def connect(self, platform: Platform) -> tuple[ParallelGroup, Pipeline]:
        order = self._order
        return connect(platform, self._memory, order.rank, order.config.parallel, order.meeting)

    def has_order(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def take_order(self, obey: Callable[[messages.ToRank, NDArray[np.uint8]], None]) -> None:
        position, header, payload = NOTICE.unpack(receive_exactly(self._socket, NOTICE.size))
        if position < 0:
            data = receive_exactly(self._socket, header + payload)
            obey(messages.decode_order(data[:header]), np.frombuffer(data, np.uint8, payload, header))
            return
        message, rest = self._ring.read(position, header, payload)
        obey(messages.decode_order(message), rest)
        self._ring.release(position, header + payload)

    def send(self, message: messages.FromRank) -> None:
        with self._send_lock:
            self._socket.sendall(messages.frame(message))


class Rank:
    def __init__(self, config: EngineConfig, rank: int, num_local: int, channel: RankChannel) -> None:
        """`num_local` ranks run on this host."""
        self._config, self._rank, self._num_local, self._channel = config, rank, num_local, channel
        self._running: deque[tuple[StepPlan, InProcStep]] = deque()
        self._awaits_masks = False  # of the newest one, which has no result before

    def run(self) -> int:
        """Serve until the engine is gone; returns the exit status."""
        try:
            executor = self._start()
            self._channel.send(messages.Described(executor.description))
            self._serve(executor)
            return 0
        except Exception as error:  # whatever it was, the engine must hear of it
            is_permanent = isinstance(error, QuireError) and not isinstance(error, EngineError)
            cause = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            if not is_permanent:
                logger.error("rank %d cannot go on", self._rank, exc_info=error)
            self._channel.send(messages.Died(cause, is_permanent))
            return 1

    def _serve(self, executor: InProcExecutor) -> None:
        """Obey until the engine is gone."""
        try:
            while True:
                while len(self._running) > self._awaits_masks and not self._channel.has_order():
                    self._answer(executor)
                self._channel.take_order(partial(self._obey, executor))
        except EOFError:
            executor.shutdown()

    def _start(self) -> InProcExecutor:
        platform = get_platform(self._config.device.device)
        place = self._channel.connect(platform)
        with paused_collector():
            worker = Worker(self._with_threads(self._config), self._report, *place)
        return InProcExecutor(worker)

    def _with_threads(self, config: EngineConfig) -> EngineConfig:
        """Ranks share the cores, unless the user gives each its threads."""
        if config.device.num_threads is not None:
            return config
        threads = max(1, len(os.sched_getaffinity(0)) // self._num_local)
        return replace(config, device=replace(config.device, num_threads=threads))

    def _report(self, name: str, progress: float | None = None) -> None:
        if self._rank == 0:
            self._channel.send(messages.Phase(name, progress))

    def _obey(self, executor: InProcExecutor, message: messages.ToRank, payload: NDArray[np.uint8]) -> None:
        match message:
            case messages.Execute(plan, returned):
                if returned:
                    executor.learn(returned)
                step = executor.execute(plan)
                self._running.append((plan, step))
                self._awaits_masks = bool(plan.mask_slots)
                if step.done() and not self._awaits_masks:
                    self._answer_all(executor)
            case messages.Sample(count):
                masks: Future[Masks] = Future()
                masks.set_result(payload.view(np.int32).reshape(count, -1))
                self._running[-1][1].sample(masks)
                self._awaits_masks = False
                if self._running[-1][1].done():
                    self._answer_all(executor)
            case messages.Prepare():
                self._channel.send(messages.Prepared(executor.capture_next()))
            case messages.ReadAdapter(ref):
                executor.read_adapter(ref).add_done_callback(lambda done: self._tell_adapter(ref.digest, done))
            case messages.ForgetAdapter(digest):
                executor.forget_adapter(digest)
            case messages.Sleep() | messages.Wake() | messages.CheckWeights() | messages.UpdateWeights():
                self._answer_all(executor)
                self._change(executor, message).add_done_callback(self._tell_change)
            case messages.Pause():
                self._awaits_masks = False
                self._answer_all(executor)
                executor.call_workers(lambda worker: worker.runner.stage.start_over())
                self._channel.send(messages.Paused())

    def _change(self, executor: InProcExecutor, message: messages.RankChange) -> Future[str]:
        match message:
            case messages.Sleep(level):
                return executor.sleep(level)
            case messages.Wake():
                return executor.wake()
            case messages.CheckWeights(path):
                return executor.check_weights(path)
            case messages.UpdateWeights(path):
                return executor.update_weights(path)

    def _answer_all(self, executor: InProcExecutor) -> None:
        while self._running:
            self._answer(executor)

    def _answer(self, executor: InProcExecutor) -> None:
        """Tell how the oldest step went: the first rank that samples always, the others if it failed."""
        plan, step = self._running.popleft()
        error, failure = step.exception(), self._channel.failure
        if isinstance(error, Exception):
            is_echo = failure.is_told  # then the error may be no more than a result of what went wrong there
            failure.tell()
            reason = f"{type(error).__name__}: {error}"
            self._channel.send(messages.Failed(plan.step_id, reason, executor.is_sticky(error), is_echo))
        elif failure.is_told:
            self._channel.send(messages.Failed(plan.step_id, "another rank failed", is_sticky=False, is_echo=True))
        elif self._rank == self._config.parallel.answering_rank:
            self._channel.send(messages.Done(step.result()))

    def _tell_adapter(self, digest: str, reading: Future[int]) -> None:
        error = reading.exception()
        if error is None:
            self._channel.send(messages.AdapterRead(digest, reading.result()))
        else:
            self._channel.send(messages.AdapterRead(digest, 0, str(error)))

    def _tell_change(self, done: Future[str]) -> None:
        error = done.exception()
        if error is None:
            self._channel.send(messages.Changed(done.result()))
        else:
            reason = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._channel.send(messages.Changed("", reason, isinstance(error, EngineDeadError)))


def set_up_process(rank: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    level = log_level()
    setup_logging("WARNING" if rank and level == "INFO" else level)  # all of them would say the same


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:  # the parent is gone
        return 0
    order = msgspec.json.decode(line, type=messages.RankOrder)
    set_up_process(order.rank)
    channel, stopped = LocalChannel(order), threading.Event()
    beat = (channel.beat, os.getppid(), stopped)
    threading.Thread(target=keep_beating, args=beat, name="quire-heartbeat", daemon=True).start()
    status = Rank(order.config, order.rank, order.size, channel).run()
    stopped.set()
    return status


if __name__ == "__main__":
    sys.exit(main())
