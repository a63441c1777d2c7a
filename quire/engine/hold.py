"""Hold: what keeps an engine from planning steps. A pause, sleep, or a change of its weights.

Requests lose no token: they give up their rows and blocks, wait, and go on from what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from quire.types.control import Change, EngineState, WeightsUpdate
from quire.types.errors import ConfigError, EngineDeadError, EngineError, QuireError
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.utils.log import get_logger

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = get_logger(__name__)


class Hold:
    """Everything happens on the engine's thread, but the work of a change itself."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.is_active = False
        """Whether no step may be planned."""
        self._asleep = 0
        self._is_paused = False
        self._weights = ""
        self._error: str | None = None
        self._changing: Change | None = None
        self._level = 0  # of the sleep that begins
        self._work: Future[str] | None = None
        self._drains_for: WeightsUpdate | None = None
        self._late: dict[str, EngineRequest] = {}  # that came since, and whose turn has not come

    @property
    def has_news(self) -> bool:
        """Whether `advance` has something to do."""
        if self._drains_for is not None:
            return not self._core.scheduler.has_unfinished and not self._core.parked
        return self._work is not None and self._work.done()

    @property
    def is_away(self) -> bool:
        """Whether there are no weights to run requests with, or soon will not be."""
        return self._asleep > 0 or self._changing is not None

    @property
    def num_late(self) -> int:
        return len(self._late)

    def state(self) -> EngineState:
        limits = self._core.scheduler.live_limits
        assert limits.max_num_seqs is not None
        assert limits.max_num_batched_tokens is not None
        held = self._asleep, self._is_paused, self._changing, self._error, self._weights
        return EngineState(*held, limits.max_num_seqs, limits.max_num_batched_tokens)

    def pause(self, is_paused: bool) -> None:
        """Plan no more steps, those in flight end; or go on."""
        self._is_paused = is_paused
        self._settle()

    def sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise ConfigError(f"the level of sleep is {level} but must be 1 (weights stay in host memory) or 2")
        if self._asleep == level:
            return
        if self._asleep > level:
            raise EngineError(f"the engine sleeps at level {self._asleep}; wake it first")
        self._begin("sleep")
        self._level = level
        self._start(self._core.executor.sleep(level))

    def wake(self) -> None:
        self._error = None  # that of an earlier change says nothing about this one
        if self._asleep:
            self._begin("wake")
            self._start(self._core.executor.wake())

    def update(self, wanted: WeightsUpdate) -> None:
        if self._asleep:
            raise EngineError("the engine sleeps; wake it before its weights are updated")
        if wanted.requests == "drain":
            self._check_free()
            self._changing, self._error, self._drains_for = "update_weights", None, wanted
            self.advance()
            return
        self._begin("update_weights")
        if wanted.requests == "abort":
            self._core.abort_all()
        self._start(self._core.executor.update_weights(wanted.path))

    def call_workers(self, call: Callable[[Any], Any]) -> list[Any]:
        """Behind a barrier: no step is in flight. Requests keep their rows and blocks."""
        if self.is_away:
            raise EngineError("the engine sleeps, or its weights change; its workers are not to be had")
        before, self.is_active = self.is_active, True
        try:
            self._core.finish_steps()
            return self._core.executor.call_workers(call)
        finally:
            self.is_active = before

    def takes(self, request: EngineRequest) -> bool:
        """Whether a request has to wait here, until others have ended or the engine is awake."""
        if self.is_away:
            self._late[request.request_id] = request
        return self.is_away

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        gone = [self._late.pop(name) for name in request_ids if name in self._late]
        return [EngineOutput(request.request_id, [], finish_reason="abort") for request in gone]

    def advance(self) -> None:
        """Begin what waited for requests to end; end what is done."""
        if not self.has_news:
            return
        if self._drains_for is not None:
            wanted, self._drains_for, self._changing = self._drains_for, None, None
            self._begin("update_weights")
            self._start(self._core.executor.update_weights(wanted.path))
            return
        work, change = self._work, self._changing
        assert work is not None
        assert change is not None
        self._core.log.ready("", change)
        self._work = self._changing = None
        try:
            digest = work.result()
        except EngineDeadError:
            raise
        except Exception as error:  # told to whoever asked for it; the engine is as it was
            self._error = str(error) if isinstance(error, QuireError) else repr(error)
            logger.error("%s failed: %s", change, self._error, exc_info=not isinstance(error, QuireError) and error)
        else:
            logger.info("%s is done", change)
            if change == "update_weights":
                self._weights = digest
                self._core.scheduler.use_weights(digest)
            else:
                self._asleep = self._level if change == "sleep" else 0
        self._settle()
        if not self._asleep:
            late, self._late = self._late, {}
            for request in late.values():
                self._core.say(self._core.add_request(request))

    def _check_free(self) -> None:
        if self._changing is not None:
            raise EngineError(f"{self._changing} is under way; wait until it has ended")

    def _begin(self, change: Change) -> None:
        """A barrier: no step is in flight behind it, and nobody has a row or a block."""
        self._check_free()
        self._changing, self._error, self.is_active = change, None, True
        self._core.log.held(change)
        self._core.finish_steps()
        self._core.scheduler.stand_down()

    def _start(self, work: Future[str]) -> None:
        self._work = work
        work.add_done_callback(lambda _: self._core.parked.on_news())

    def _settle(self) -> None:
        self.is_active = self._is_paused or self._asleep > 0 or (self._changing is not None and not self._drains_for)
        word = "asleep" if self._asleep else self._changing or "paused"
        self._core.log.held(word if self.is_active else "")
