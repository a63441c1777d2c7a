"""EngineLoop: takes messages in, runs steps while there is work, hands outputs out. Sleeps when idle."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.types.messages import AbortRequests, Command, Reply, ToEngine
from quire.types.outputs import CacheChanges, EngineOutput, EngineOutputs
from quire.types.request import EngineRequest

_QUIET = 1.0  # seconds without work after which there may be none for a while


class EngineLoop:
    """One core driven either by its caller (`run_once`) or by a thread or process (`run`).

    `submit` and `stop` may be called from any thread.
    """

    def __init__(self, core: EngineCore, *, debug_checks: bool = False, quiet: float = _QUIET) -> None:
        self.on_reply: Callable[[Reply], None] = lambda reply: None
        """Told, on the thread that runs the loop, what came of each command."""
        self._core = core
        self._answers: list[EngineOutput] = []  # of requests that no step has to run for
        self._inbox: deque[ToEngine | EngineOutput] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._finishing = False
        self._debug_checks = debug_checks
        self._quiet_after = quiet
        self._quiet: float | None = quiet  # seconds until the engine prepares for steps to come; None: it has
        core.parked.on_news = core.executor.on_failure = self._wake.set

    def submit(self, message: ToEngine | EngineOutput) -> None:
        """Take a message in; an EngineOutput is an answer that is already known and goes out with the next step."""
        self._inbox.append(message)
        self._wake.set()

    def stop(self, *, finish_work: bool = False) -> None:
        """Make `wait` say False: now, or when there is no more work."""
        if finish_work:
            self._finishing = True
        else:
            self._stopping = True
        self._wake.set()

    def shutdown(self) -> None:
        """Free what the engine holds, once nobody runs it any more."""
        self._core.shutdown()

    def has_work(self) -> bool:
        """Whether `run_once` would do anything now."""
        return bool(self._inbox or self._answers) or self._core.has_work()

    def has_unfinished(self) -> bool:
        """Whether any request will be heard of again."""
        return bool(self._inbox or self._answers) or self._core.has_unfinished()

    def run_once(self) -> EngineOutputs:
        """Take in what has arrived and finish one step. Returns at once when there is nothing to do.

        When all requests are parked, it waits too.
        """
        if not self.has_work() and self.has_unfinished():
            self.wait()
        if not self.take_messages() and not self._core.has_work():
            return EngineOutputs([], cached=self._cache_changes())  # commands alone change no queue
        self._quiet = self._quiet_after
        outputs = self._core.step()
        answers, self._answers = self._answers, []
        if answers or self._core.cache_stream is not None:
            outputs = EngineOutputs(answers + outputs.outputs, outputs.stats, self._cache_changes())
        if self._debug_checks and not self._core.has_work():
            self._core.check_integrity()
        return outputs

    def _cache_changes(self) -> CacheChanges | None:
        return None if self._core.cache_stream is None else self._core.cache_stream.take()

    def wait(self) -> bool:
        """Sleep until there is work, or prepare for it; False when the loop was asked to stop."""
        while True:
            self._wake.clear()  # before looking: what comes after the look wakes the wait
            if self._stopping:
                return False
            if self.has_work():
                return True
            if self._finishing:
                return False
            begin = time.monotonic()
            if not self._wake.wait(self._quiet):
                self._quiet = 0.0 if self._core.capture_next() else None
            elif self._quiet is not None:  # a command may have come: it is still quiet, however many come
                self._quiet = max(0.0, self._quiet - (time.monotonic() - begin))

    def take_messages(self) -> bool:
        """Take in what has arrived, without running a step; on the thread that runs the loop.

        False if nothing came but commands.
        """
        has_news = bool(self._answers)
        while self._inbox:
            message = self._inbox.popleft()
            if not isinstance(message, EngineOutput):
                self._core.log.took(message)
            has_news |= not isinstance(message, Command)
            match message:
                case EngineRequest():
                    self._answers += self._core.add_request(message)
                case AbortRequests():
                    self._answers += self._core.abort(message.request_ids)
                case Command():
                    self.on_reply(obey(self._core, message))
                case EngineOutput():
                    self._answers.append(message)
        return has_news
