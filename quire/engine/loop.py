"""EngineLoop: takes messages in, runs steps while there is work, hands outputs out. Sleeps when idle."""

from __future__ import annotations

import threading
from collections import deque

from quire.engine.core import EngineCore
from quire.types.messages import AbortRequests, ResetPrefixCache, ToEngine
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest
from quire.types.structured import Vocabulary

_QUIET = 1.0  # seconds without work after which there may be none for a while


class EngineLoop:
    """One core driven either by its caller (`run_once`) or by a thread or process (`run`).

    `submit` and `stop` may be called from any thread.
    """

    def __init__(self, core: EngineCore, *, debug_checks: bool = False) -> None:
        self._core = core
        self._inbox: deque[ToEngine | EngineOutput] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._finishing = False
        self._debug_checks = debug_checks
        core.parked.on_news = self._wake.set

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
        return bool(self._inbox) or self._core.has_work()

    def has_unfinished(self) -> bool:
        """Whether any request will be heard of again."""
        return bool(self._inbox) or self._core.has_unfinished()

    def run_once(self) -> EngineOutputs:
        """Take in what has arrived and finish one step. Returns at once when there is nothing to do.

        When all requests are parked, it waits too.
        """
        if not self.has_work() and self.has_unfinished():
            self.wait()
        answers = self._take_messages()
        outputs = self._core.step()
        if answers:
            outputs = EngineOutputs(answers + outputs.outputs, outputs.stats)
        if self._debug_checks and not self._core.has_work():
            self._core.check_integrity()
        return outputs

    def wait(self) -> bool:
        """Sleep until there is work, or prepare for it; False when the loop was asked to stop."""
        quiet: float | None = _QUIET
        while True:
            self._wake.clear()  # before looking: what comes after the look wakes the wait
            if self._stopping:
                return False
            if self.has_work():
                return True
            if self._finishing:
                return False
            if not self._wake.wait(quiet):
                quiet = 0.0 if self._core.prepare() else None

    def _take_messages(self) -> list[EngineOutput]:
        answers: list[EngineOutput] = []
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case EngineRequest():
                    answers += self._core.add_request(message)
                case AbortRequests():
                    answers += self._core.abort(message.request_ids)
                case ResetPrefixCache():
                    self._core.scheduler.reset_prefix_cache()
                case Vocabulary():
                    self._core.constraints.set_vocabulary(message)
                case EngineOutput():
                    answers.append(message)
        return answers
