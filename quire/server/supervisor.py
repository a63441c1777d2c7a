"""EngineSupervisor: keeps one engine process serving. Restarts it when it dies or stalls, and reports its health.

Streams outlive the process: a ResumingClient stands between them, and hands open requests to the next one.

Knows processes and streams, not HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from quire.config.engine import EngineConfig
from quire.engine.child import TakeLine, print_line
from quire.engine.client import EngineClient
from quire.engine.flight import dump_path
from quire.engine.replicas import ReplicaClient, launch_replicas
from quire.engine.resuming import EngineLoss, ResumingClient
from quire.engine.spare import NO_SPARE, NoSpare, StandbyEngine
from quire.engine.stalls import (
    CHANGE_PATIENCE,
    LOOK_INTERVAL,
    STACKS_GRACE,
    STALL_TIMEOUT,
    START_PATIENCE,
    StallWatch,
    start_limit,
)
from quire.engine.zmq_client import OnPhase, ZmqClient, ignore_phases
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.controls import ClientControls
from quire.frontend.text_model import TextModel
from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.server.control.operator import Wanted, Word
from quire.types.errors import EngineDeadError, EngineError, EngineStartError, EngineUnavailableError, RequestError
from quire.types.messages import StartupPhase
from quire.types.outputs import EngineStats
from quire.types.request import AdapterRef
from quire.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
Status = Literal["starting", "ready", "restarting", "stalled", "draining", "failed", "stopped", Word]

_SPARE_LOOKS = 12  # an engine that was never idle for this many looks gets its spare all the same
_MOST_NAMED = 4  # requests in such a line
_HELD: dict[Word, str] = {
    "asleep": "it sleeps; requests wait until it is woken, or are refused",
    "paused": "an operator has paused it; requests wait",
    "changing": "it goes to sleep, wakes, or gets other weights",
}
_RETRY_AFTER = 2.0  # seconds, where nothing better is known


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    stall_timeout: float = STALL_TIMEOUT
    """Seconds without a finished step, while requests wait, after which the engine counts as stalled; it is
    asked for its stacks and then replaced."""
    max_restarts: int = 3
    """Restarts within restart_window before giving up. Deaths of engines that gave tokens do not count."""
    restart_window: float = 300.0
    restart_backoff: float = 0.5
    """Seconds before the first restart; each further one within the window waits twice as long."""
    max_backoff: float = 30.0
    drain_timeout: float = 30.0
    """Seconds that open streams get to end."""
    drain_interval: float = 5.0
    """Seconds between two lines about what a drain waits for."""
    start_patience: float = START_PATIENCE
    """Times stall_timeout that a start may be silent: kernels are built, files read."""
    change_patience: float = CHANGE_PATIENCE
    """The same of sleep, waking and new weights."""
    stacks_grace: float = STACKS_GRACE
    """Seconds for a stalled engine to write its stacks, before it is replaced."""
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


async def always() -> None:
    """There is memory for the engine."""


ServingClient = ZmqClient | ReplicaClient
LaunchClient = Callable[[EngineConfig, OnPhase], ServingClient]


def launch_client(
    config: EngineConfig, on_phase: OnPhase, take_line: TakeLine = print_line, spare: NoSpare = NO_SPARE
) -> ServingClient:
    """An engine in the spare process, if there is one, else in a new one; or several replicas."""
    if config.parallel.data_parallel_size > 1 or config.parallel.elastic:
        return launch_replicas(config, take_line, on_phase)
    return ZmqClient(config, child=spare.take(), on_phase=on_phase, take_line=take_line)


def launch_standby(
    config: EngineConfig, on_phase: OnPhase, standby: StandbyEngine, take_line: TakeLine = print_line
) -> ZmqClient:
    """The engine that stands by, if there is one, else a new one."""
    client = standby.take_client()
    return ZmqClient(config, on_phase=on_phase, take_line=take_line) if client is None else client


class MakeEngine(Protocol):
    def __call__(self, client: EngineClient, text: TextModel, *, observer: Observer) -> AsyncEngine: ...


class EngineReplacedError(EngineError):
    """The engine is stopped because an operator wants another one."""


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
        spare: NoSpare = NO_SPARE,
        may_launch: Callable[[], Awaitable[None]] = always,
        make_engine: MakeEngine = AsyncEngine,
        adapters: Sequence[AdapterRef] = (),
    ) -> None:
        """`on_phase` gets the phases of each start; `observer` is handed to each AsyncEngine, made by `make_engine`.

        `may_launch` is awaited before each launch of a process.

        `spare` is launched when an engine is ready and idle, for `launch` to take; it is stopped with the rest.

        The first engine reads `adapters` before it gets requests; if one cannot be served, the start has failed.
        """
        self.wanted = Wanted(config)
        """What an operator has made of the engine; the next one will be the same."""
        self._text = text
        self._options = options or SupervisorOptions()
        self._on_phase = on_phase
        self._observer = observer
        self._launch = launch
        self._spare = spare
        self._may_launch = may_launch
        self._make_engine = make_engine
        self._adapters = adapters
        self._client: ServingClient | None = None
        self._resuming: ResumingClient | None = None
        self._engine: AsyncEngine | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._status: Status = "starting"
        self._detail = "the engine has not been started"
        self._is_draining = False
        self._num_restarts = 0
        self._deaths: deque[float] = deque()  # within the window, of engines that gave no token
        self._num_refusals = 0  # of requests that died alone, since the last token
        self._wants_restart = asyncio.Event()
        self._turn = asyncio.Event()
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

    async def wait_serving(self) -> None:
        """Wait until an engine that is on its way takes requests; raises why if none will."""
        while self._status in ("starting", "restarting"):
            await self._turned()
        if self._error is not None:
            raise self._error

    @property
    def engine(self) -> AsyncEngine:
        """What takes requests, also during a restart; EngineUnavailableError, with a time to wait, if none does."""
        if self.wanted.refuses:
            raise EngineUnavailableError(
                "the engine is asleep, and takes no requests until it is woken", _RETRY_AFTER
            )
        if self._is_draining:
            raise self._unavailable()
        return self.operated_engine

    @property
    def operated_engine(self) -> AsyncEngine:
        """The same, also while the engine sleeps and refuses requests, and while it finishes what runs."""
        # While it restarts, requests wait in the ResumingClient for the next engine, as open ones do.
        if self._engine is None or self._status not in ("ready", "restarting", "draining"):
            raise self._unavailable()
        return self._engine

    def _unavailable(self) -> EngineUnavailableError:
        health = self.health()
        return EngineUnavailableError(f"the engine is {health.status}: {health.detail}", _RETRY_AFTER)

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
        parts = [] if self._client is None else self._client.parts
        silent, limit, what = min(map(self._silence, parts), default=(0.0, 0.0, ""))  # all that serves has stalled
        word = self.wanted.word
        if status == "ready" and silent > limit:
            status, detail = "stalled", f"{what} for {silent:.0f} s"
        elif status == "ready" and word is not None:
            status, detail = word, _HELD[word]
        return Health(status, detail, self._num_restarts, self._engine.num_requests if self._engine else 0)

    async def restart_engine(self) -> int:
        """Replace the engine by a new process, in which open requests go on; returns the pid of the new one.

        EngineUnavailableError while it is not ready, EngineError if no new one comes up.
        """
        before = self._client
        if before is None or self._status != "ready":
            raise EngineUnavailableError(f"the engine is {self._status} and cannot be restarted now", _RETRY_AFTER)
        self._wants_restart.set()
        while self._status in ("ready", "restarting"):
            if self._client is not None and self._client is not before and self._status == "ready":
                return self._client.pid
            await self._turned()
        raise EngineError(f"the engine is {self._status}: {self._detail}")

    @property
    def num_replicas(self) -> int:
        return self.wanted.config.parallel.data_parallel_size

    async def resize(self, count: int) -> int:
        """Have `count` replicas of the engine, whose number is returned; no open request is lost.

        An engine that is not elastic is restarted as one that is. EngineUnavailableError while it is not ready,
        EngineError if a replica does not come up.
        """
        if self._client is None or self._status != "ready":
            why = f"the engine is {self._status}; the number of its replicas cannot be changed now"
            raise EngineUnavailableError(why, _RETRY_AFTER)
        if self.wanted.config.parallel.shares_experts:
            raise EngineError(
                "these replicas share experts (--enable-expert-parallel), so none can come or go alone; start the"
                f" server again with -dp {count}"
            )
        self.wanted.config.with_replicas(count)  # can it be?
        if not isinstance(self._client, ReplicaClient) and count > 1:
            self.wanted.config = self.wanted.config.with_replicas(1)
            await self.restart_engine()
        if isinstance(self._client, ReplicaClient):
            await self._client.resize(count, self._options.drain_timeout)
            self.wanted.config = self.wanted.config.with_replicas(count)
        return self.num_replicas

    async def drain_replica(self, index: int) -> None:
        """End one replica within drain_timeout; no open request is lost. See `restore_replica`."""
        await self._replica_client().drain(index, self._options.drain_timeout)

    async def restore_replica(self, index: int) -> None:
        """Launch a replica that was drained. A restart of the whole engine brings back all of them."""
        await self._replica_client().restore(index)

    def _replica_client(self) -> ReplicaClient:
        if self._client is None or self._status != "ready":
            raise EngineUnavailableError(f"the engine is {self._status}; ask again when it is ready", _RETRY_AFTER)
        if not isinstance(self._client, ReplicaClient):
            raise EngineError("there is one engine, without replicas; start the server with -dp 2 or more")
        return self._client

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
            word = self.wanted.word
            held = "" if word is None else f" while the engine is {word} ({_HELD[word]})"
            logger.info("waiting at most %.0f s for %s to finish%s", left, _in_words(engine.request_ids), held)
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.wait_idle(), min(left, self._options.drain_interval))
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
        self._end_streams("the engine was shut down")
        self._settled.set()

    async def _supervise(self) -> None:
        while True:
            error = await self._run_engine()
            loss = await self._retire(str(error), is_planned=isinstance(error, EngineReplacedError))
            is_busy = self._engine is not None and self._engine.num_requests > 0
            if self._is_draining and not is_busy:
                # A signal to the process group reaches the engine too, which then exits by itself when it is idle.
                logger.info("%s", error)
                return
            if isinstance(error, EngineReplacedError) and not self._is_draining:
                logger.info("%s", error)
                continue
            if isinstance(error, EngineStartError) or not self._may_restart(loss):
                self._give_up(error)
                return
            await self._back_off(error)

    async def _run_engine(self) -> EngineError:
        """Launch an engine and let it serve; returns why it ended."""
        await self._may_launch()
        begin = time.monotonic()
        self._wants_restart.clear()
        try:
            client = self._client = self._launch(self.wanted.config, self._take_phase)
            await self._within_stall(client, client.wait_ready_async(), "it starts")
            phases = ", ".join(f"{phase.name} {phase.seconds:.2f}" for phase in client.start_phases)
            logger.info("engine process %d is ready after %.2f s (%s)", client.pid, time.monotonic() - begin, phases)
            engine = await self._within_stall(client, self._attach(client), "it takes over requests")
        except EngineError as error:
            return error
        except OSError as error:
            return EngineDeadError(f"the engine process cannot be launched: {error}")
        sparing = asyncio.create_task(self._start_spare(engine))
        if self._status in ("starting", "restarting"):
            self._set_status("ready", "it takes requests")
        self._settled.set()
        try:
            death = await self._watch(client, engine)
        finally:
            sparing.cancel()
        if self._status == "ready":
            self._set_status("restarting", str(death))
        return death

    async def _within_stall(self, client: ServingClient, work: Coroutine[Any, Any, T], phase: str) -> T:
        """Wait for a part of the start; EngineDeadError, after its stacks were asked for, if it says nothing more."""
        limit, stalls = (
            start_limit(self._options.stall_timeout, self._options.start_patience),
            self._stall_watch(client),
        )
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                stalls.look(client.seconds_without_news(), limit, f"while {phase}, it has said nothing")
                await asyncio.wait([task], timeout=min(LOOK_INTERVAL, limit / 2))
        finally:
            task.cancel()
        return task.result()

    async def _attach(self, client: ServingClient) -> AsyncEngine:
        """Let the streams have this engine; open requests go on in it."""
        if self._engine is None:
            await self._check_adapters(ClientControls(client))
        await self.wanted.tell(client)
        if self._engine is None or self._resuming is None:
            self._resuming = ResumingClient(client.info)
            await self._resuming.attach(client)
            self._engine = self._make_engine(self._resuming, self._text, observer=self._observer)
            self._preparing = asyncio.create_task(self._prepare(self._engine))
            return self._engine
        num_resumed = await self._resuming.attach(client)
        self._engine.note_restart()
        if num_resumed:
            logger.info("%d open requests go on in engine process %d", num_resumed, client.pid)
            self._observer.on_resume(num_resumed)
        return self._engine

    async def _check_adapters(self, engine: ClientControls) -> None:
        for ref in self._adapters:  # one after the other: host memory has room for some of them
            try:
                await engine.load_adapter(ref)
            except RequestError as error:
                raise EngineStartError(f"lora_modules has {ref.name!r}: {error}") from error

    async def _prepare(self, engine: AsyncEngine) -> None:
        """Do now what would delay the first requests."""
        try:
            await engine.prepare_structured_outputs()
        except EngineError as error:
            logger.debug("the engine died before it knew its vocabulary: %s", error)

    async def _start_spare(self, engine: AsyncEngine) -> None:
        """Launch the next spare while nobody needs the cores that its imports take; under endless load, late."""
        for _ in range(0 if self._spare.starts_at_once else _SPARE_LOOKS):
            await asyncio.sleep(self._options.spare_delay)
            if engine.num_requests == 0:
                break
        self._spare.start()

    async def _watch(self, client: ServingClient, engine: AsyncEngine) -> EngineError:
        """Watch a serving engine until it dies or its outputs cannot be read any more."""
        interval = min(LOOK_INTERVAL, self._options.stall_timeout / 2)
        stalls: dict[int, StallWatch] = {}  # by process
        death = asyncio.create_task(client.wait_dead())
        wanted = asyncio.create_task(self._wants_restart.wait())
        try:
            while not death.done():
                if wanted.done():
                    self._wants_restart.clear()
                    return EngineReplacedError(f"engine process {client.pid} is replaced, as an operator asked")
                if engine.is_dead:
                    return EngineDeadError("the engine's outputs cannot be read any more; the log says why")
                await asyncio.wait([death, wanted], timeout=interval, return_when=asyncio.FIRST_COMPLETED)
                for part in client.parts:
                    self._look_for_stall(part, stalls.setdefault(part.pid, self._stall_watch(part)))
        finally:
            death.cancel()
            wanted.cancel()
        return death.result()

    def _stall_watch(self, client: ServingClient) -> StallWatch:
        return StallWatch(client.dump_stacks, self._options.stacks_grace)

    def _look_for_stall(self, part: ZmqClient, stalls: StallWatch) -> None:
        """End a process that stalls, once it has said in its log where it hangs; other replicas go on."""
        if part.is_dead:
            return
        try:
            stalls.look(*self._silence(part))
        except EngineDeadError as error:
            part.end(str(error))

    def _silence(self, part: ZmqClient) -> tuple[float, float, str]:
        """Seconds without what a process should do now, how many of them make a stall, and what it is."""
        word, timeout = self.wanted.word, self._options.stall_timeout
        if word is not None:
            part.forgive_stall()
        if word == "changing":  # with "drain" it goes on with steps
            silent = time.monotonic() - max(self.wanted.changing_since, part.step_at)
            return silent, self._options.change_patience * timeout, "it is being changed and does not end"
        return part.seconds_without_step(), timeout, "requests wait and no step has finished"

    def _take_phase(self, phase: StartupPhase) -> None:
        if self._status in ("starting", "restarting"):
            share = "" if phase.progress is None else f" ({phase.progress:.0%})"
            self._detail = f"loading: {phase.name}{share}"
        self._on_phase(phase)

    def _may_restart(self, loss: EngineLoss) -> bool:
        """Count a death, unless its engine gave tokens or the search for the request that killed it goes on."""
        if loss.has_progressed:
            self._deaths.clear()
            self._num_refusals = 0
        elif loss.num_refused:
            self._deaths.clear()  # their cause was found
            self._num_refusals += loss.num_refused
        elif not loss.was_trying:
            self._deaths.append(time.monotonic())
            while self._deaths[-1] - self._deaths[0] > self._options.restart_window:
                self._deaths.popleft()
        return max(len(self._deaths), self._num_refusals) <= self._options.max_restarts

    async def _back_off(self, error: EngineError) -> None:
        wait = backoff(self._options, len(self._deaths)) if self._deaths else 0.0
        self._num_restarts += 1
        if not self._is_draining:
            self._set_status("restarting", str(error))
        logger.error("%s; restart %d in %.1f s", error, self._num_restarts, wait)
        await asyncio.sleep(wait)

    def _give_up(self, error: EngineError) -> None:
        self._set_status("failed", str(error))
        self._end_streams(str(error))
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
        self._turn.set()
        self._turn = asyncio.Event()

    async def _turned(self) -> None:
        """Wait until the status is set."""
        await self._turn.wait()

    async def _retire(self, cause: str = "the server is stopping", *, is_planned: bool = False) -> EngineLoss:
        """End the process, if it lives. Its streams stay open, for the next engine. Who comes second waits."""
        async with self._retiring:
            client, loss = self._client, EngineLoss()
            if client is None:
                return loss
            await client.stop_async()
            if self._resuming is not None:
                loss = self._resuming.lose(cause, is_planned=is_planned)
                self._observer.on_engine_down()
            client.shutdown()
            self._client = None
            self._name_dump(client.pid)
            if self._engine is not None and self._engine.is_dead:
                self._end_streams(cause)
            return loss

    def _name_dump(self, pid: int) -> None:
        """Say where the last steps of a dead engine are; one that ended in good order has left none."""
        folder = self.wanted.config.tracing.dump_dir
        if folder is not None and (path := dump_path(Path(folder).expanduser(), pid)).exists():
            logger.error("its last steps are in %s; `quire explain` says what it was doing", path)

    def _end_streams(self, reason: str) -> None:
        """No engine will come for them: every stream that is still open ends."""
        if self._preparing is not None:
            self._preparing.cancel()
        if self._engine is not None:
            self._engine.shutdown(reason)
        self._preparing = self._engine = self._resuming = None
