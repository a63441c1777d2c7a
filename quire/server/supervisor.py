"""EngineSupervisor: keeps one engine process serving. Restarts it when it dies, and reports its health.

Knows processes and streams, not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from quire.config.engine import EngineConfig
from quire.engine.child import TakeLine, print_line
from quire.engine.spare import NO_SPARE, Spare
from quire.engine.zmq_client import OnPhase, ZmqClient, ignore_phases
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.types.errors import EngineDeadError, EngineError, EngineStartError, EngineUnavailableError
from quire.types.messages import StartupPhase
from quire.types.outputs import EngineStats
from quire.utils.log import get_logger

logger = get_logger(__name__)

Status = Literal["starting", "ready", "restarting", "stalled", "draining", "failed", "stopped"]

_LOOK_INTERVAL = 1.0  # seconds between two looks at the engine's progress
_SPARE_LOOKS = 12  # an engine that was never idle for this many looks gets its spare all the same
_DRAIN_INTERVAL = 5.0  # seconds between two lines about what a drain waits for
_MOST_NAMED = 4  # requests in such a line
_RETRY_AFTER = 2.0  # seconds, where nothing better is known


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    stall_timeout: float = 120.0
    """Seconds without a finished step, while requests wait, after which the engine counts as stalled."""
    max_restarts: int = 3
    """Restarts within restart_window before giving up."""
    restart_window: float = 300.0
    restart_backoff: float = 0.5
    """Seconds before the first restart; each further one within the window waits twice as long."""
    max_backoff: float = 30.0
    drain_timeout: float = 30.0
    """Seconds that open streams get to end."""
    spare_delay: float = 5.0
    """Seconds between two looks whether a ready engine is idle, so that a spare can be launched."""


@dataclass(frozen=True)
class Health:
    """How the engine is: one word, and a sentence for people."""

    status: Status
    detail: str
    num_restarts: int
    num_requests: int


def backoff(options: SupervisorOptions, num_deaths: int) -> float:
    """Seconds to wait before the restart after `num_deaths` deaths within the window."""
    return float(min(options.max_backoff, options.restart_backoff * 2 ** (num_deaths - 1)))


def _in_words(request_ids: Sequence[str]) -> str:
    more = len(request_ids) - _MOST_NAMED
    named = ", ".join(request_ids[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{len(request_ids)} request{'' if len(request_ids) == 1 else 's'} ({named})"


LaunchClient = Callable[[EngineConfig, OnPhase], ZmqClient]


def launch_client(
    config: EngineConfig, on_phase: OnPhase, take_line: TakeLine = print_line, spare: Spare = NO_SPARE
) -> ZmqClient:
    """An engine in the spare process, if there is one, else in a new one."""
    return ZmqClient(config, child=spare.take(), on_phase=on_phase, take_line=take_line)


class EngineSupervisor:
    """Everything is called on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        text: TextModel,
        options: SupervisorOptions | None = None,
        *,
        on_phase: OnPhase = ignore_phases,
        observer: Observer = NULL_OBSERVER,
        launch: LaunchClient = launch_client,
        spare: Spare = NO_SPARE,
    ) -> None:
        """`on_phase` gets the phases of each start; `observer` is handed to each AsyncEngine.

        `spare` is launched when an engine is ready and idle, for `launch` to take; it is stopped with the rest.
        """
        self._config = config
        self._text = text
        self._options = options or SupervisorOptions()
        self._on_phase = on_phase
        self._observer = observer
        self._launch = launch
        self._spare = spare
        self._client: ZmqClient | None = None
        self._engine: AsyncEngine | None = None
        self._status: Status = "starting"
        self._detail = "the engine has not been started"
        self._is_draining = False
        self._status_changed = asyncio.Event()
        self._num_restarts = 0
        self._deaths: deque[float] = deque()
        self._has_dumped = False
        self._retiring = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # ready for the first time, or failed
        self._failed = asyncio.Event()
        self._error: EngineError | None = None

    async def start(self) -> None:
        """Launch the engine and wait until it takes requests; raises why if it never will."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._supervise(), name="quire-supervisor")
        self._task.add_done_callback(self._on_done)
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        if self._status == "stopped":
            raise EngineDeadError("the engine was stopped before it was ready")

    @property
    def engine(self) -> AsyncEngine:
        """The engine that takes requests now; EngineUnavailableError, with a time to wait, when there is none."""
        if self._engine is None or self._status != "ready":
            health = self.health()
            raise EngineUnavailableError(f"the engine is {health.status}: {health.detail}", _RETRY_AFTER)
        return self._engine

    async def wait_engine(self) -> AsyncEngine:
        """The engine, after a restart if there is one; EngineUnavailableError when no other will come."""
        while self._status in ("starting", "restarting") or (self._status == "ready" and not self._serves()):
            await self._status_changed.wait()
        return self.engine

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics after its last step; zeros for a new engine."""
        return EngineStats() if self._client is None else self._client.stats

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def engine_pid(self) -> int | None:
        return None if self._client is None else self._client.pid

    def health(self) -> Health:
        """Ready means progress: steps are being finished, or nobody waits for one."""
        status, detail = self._status, self._detail
        stalled_for = self._stalled_for()
        if status == "ready" and stalled_for:
            status, detail = "stalled", f"requests wait and no step has finished for {stalled_for:.0f} s"
        return Health(status, detail, self._num_restarts, self._engine.num_requests if self._engine else 0)

    async def wait_failed(self) -> EngineError:
        """Wait until the supervisor gives up; the error is the cause."""
        await self._failed.wait()
        assert self._error is not None
        return self._error

    async def drain(self) -> bool:
        """Take no more requests and let open streams end; False if some have not within drain_timeout."""
        if self._status in ("failed", "stopped"):
            return True
        self._is_draining = True
        self._set_status("draining", "it finishes what runs and takes no more requests")
        if self._engine is None:
            return True
        engine, end = self._engine, time.monotonic() + self._options.drain_timeout
        while engine.num_requests and (left := end - time.monotonic()) > 0:
            logger.info("waiting at most %.0f s for %s to finish", left, _in_words(engine.request_ids))
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.wait_idle(), min(left, _DRAIN_INTERVAL))
        if engine.num_requests:
            logger.warning("%s did not finish in time and will be cut off", _in_words(engine.request_ids))
        return engine.num_requests == 0

    async def stop(self) -> None:
        """End the engine process; open streams end with EngineDeadError. May be called twice."""
        if self._status != "failed":
            self._set_status("stopped", "the server is stopping")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._spare.stop)
        await self._retire()
        self._settled.set()

    async def _supervise(self) -> None:
        while not self._is_draining:
            error = await self._run_engine()
            has_streams = self._engine is not None and self._engine.num_requests > 0
            await self._retire()
            if self._is_draining:
                # A signal to the process group reaches the engine too, which then exits by itself when it is idle.
                logger.log(logging.ERROR if has_streams else logging.INFO, "%s", error)
                return
            if isinstance(error, EngineStartError) or self._count_death() > self._options.max_restarts:
                self._give_up(error)
                return
            await self._back_off(error)

    async def _run_engine(self) -> EngineError:
        """Launch an engine and let it serve; returns why it ended."""
        begin = time.monotonic()
        try:
            client = self._client = self._launch(self._config, self._take_phase)
            await client.wait_ready_async()
        except EngineError as error:
            return error
        except OSError as error:
            return EngineDeadError(f"the engine process cannot be launched: {error}")
        phases = ", ".join(f"{phase.name} {phase.seconds:.2f}" for phase in client.start_phases)
        logger.info("engine process %d is ready after %.2f s (%s)", client.pid, time.monotonic() - begin, phases)
        self._engine = AsyncEngine(client, self._text, observer=self._observer)
        preparing = asyncio.create_task(self._prepare(self._engine))
        sparing = asyncio.create_task(self._start_spare(self._engine))
        if self._status in ("starting", "restarting"):
            self._set_status("ready", "it takes requests")
        self._settled.set()
        try:
            death = await self._watch(client, self._engine)
        finally:
            sparing.cancel()
        await preparing
        if self._status == "ready":
            self._set_status("restarting", str(death))
        return death

    async def _prepare(self, engine: AsyncEngine) -> None:
        """Do now what would delay the first requests."""
        try:
            await engine.prepare_structured_outputs()
        except EngineError as error:
            logger.debug("the engine died before it knew its vocabulary: %s", error)

    async def _start_spare(self, engine: AsyncEngine) -> None:
        """Launch the next spare while nobody needs the cores that its imports take; under endless load, late."""
        for _ in range(_SPARE_LOOKS):
            await asyncio.sleep(self._options.spare_delay)
            if engine.num_requests == 0:
                break
        self._spare.start()

    async def _watch(self, client: ZmqClient, engine: AsyncEngine) -> EngineError:
        """Watch a serving engine until it dies or its outputs cannot be read any more."""
        interval = min(_LOOK_INTERVAL, self._options.stall_timeout / 2)
        death = asyncio.create_task(client.wait_dead())
        try:
            while not death.done():
                if engine.is_dead:
                    return EngineDeadError("the engine's outputs cannot be read any more; the log says why")
                await asyncio.wait([death], timeout=interval)
                self._look_for_stall(client)
        finally:
            death.cancel()
        return death.result()

    def _look_for_stall(self, client: ZmqClient) -> None:
        """Once per stall, have the engine say in its log where it hangs."""
        stalled_for = self._stalled_for()
        if stalled_for and not self._has_dumped:
            logger.error("requests wait and no step has finished for %.0f s; asking for its stacks", stalled_for)
            client.dump_stacks()
        self._has_dumped = stalled_for > 0

    def _stalled_for(self) -> float:
        """Seconds without a finished step, if the engine has stalled; otherwise 0."""
        seconds = 0.0 if self._client is None else self._client.seconds_without_step()
        return seconds if seconds > self._options.stall_timeout else 0.0

    def _take_phase(self, phase: StartupPhase) -> None:
        if self._status in ("starting", "restarting"):
            share = "" if phase.progress is None else f" ({phase.progress:.0%})"
            self._detail = f"loading: {phase.name}{share}"
        self._on_phase(phase)

    def _count_death(self) -> int:
        """Deaths within the window, this one included."""
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > self._options.restart_window:
            self._deaths.popleft()
        return len(self._deaths)

    async def _back_off(self, error: EngineError) -> None:
        wait = backoff(self._options, len(self._deaths))
        self._num_restarts += 1
        self._set_status("restarting", str(error))
        logger.error("%s; restart %d in %.1f s", error, self._num_restarts, wait)
        await asyncio.sleep(wait)

    def _give_up(self, error: EngineError) -> None:
        self._set_status("failed", str(error))
        self._error = error
        self._failed.set()
        self._settled.set()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """After a bug in the supervisor the server fails, and does not pretend to serve."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("supervising the engine failed", exc_info=error)
            self._give_up(EngineDeadError(f"supervising the engine failed: {error!r}"))

    def _set_status(self, status: Status, detail: str) -> None:
        self._status, self._detail = status, detail
        self._status_changed.set()
        self._status_changed = asyncio.Event()

    def _serves(self) -> bool:
        return self._engine is not None and not self._engine.is_dead

    async def _retire(self) -> None:
        """End the process, if it lives, and every stream that is still open on it. Who comes second waits."""
        async with self._retiring:
            if self._client is None:
                return
            await self._client.stop_async()
            if self._engine is not None:
                self._engine.shutdown()
            self._client.shutdown()
            self._client = self._engine = None
