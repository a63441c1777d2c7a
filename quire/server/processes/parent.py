"""ApiProcesses: launches the API processes in front of one engine, launches dead ones again, and ends all of them.

They accept connections from one socket. A process that dies loses its own connections; its requests are aborted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import msgspec
import zmq

from quire.engine.child import TICK, EngineChild, TakeLine, print_line
from quire.engine.client import EngineClient
from quire.engine.transport import Receiver, Sender, UndecodableError, make_meeting
from quire.engine.zmq_client import STILL_AFTER, STILL_AFTER_STARTING
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.metrics.stats import Observer
from quire.server.launch import Supervisor
from quire.server.processes.messages import (
    ApiOrder,
    Counted,
    Drain,
    Drained,
    Failed,
    Flush,
    Flushed,
    FromApi,
    Joined,
    ProviderState,
    Serving,
    ToApi,
)
from quire.server.processes.relay import RelayEngine
from quire.types.errors import ConfigError, EngineDeadError, EngineError, EngineUnavailableError, QuireError
from quire.types.messages import AbortRequests, Command
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest
from quire.utils.log import ROOT_NAME, get_logger

logger = get_logger(__name__)

# -P: whatever lies in the current folder is not imported.
API_COMMAND = (sys.executable, "-P", "-m", "quire.server.processes.child")

_STATE_INTERVAL = 0.1  # seconds between two looks at what processes have to be told
_STOP_GRACE = 6.0  # seconds to leave; more than a process gives its last answers
_BACKOFF, _MOST_BACKOFF = 0.5, 30.0  # seconds, doubled with each death in a row of a process that never served
_FLUSH_LIMIT = 1.0  # seconds for a process to tell what it has counted


class ApiProcess:
    """One API process, from its launch to its end."""

    def __init__(
        self,
        index: int,
        make_order: Callable[[int], ApiOrder],
        take: Callable[[ApiProcess, FromApi], None],
        on_exit: Callable[[ApiProcess], None],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        command: Sequence[str] = API_COMMAND,
        take_line: TakeLine = print_line,
    ) -> None:
        """`make_order` fills in all but where the two processes meet, and the pipe for heartbeats."""
        self.index = index
        self.told: ProviderState | None = None
        self.is_serving = False
        self.is_drained = False
        self.is_gone = False
        self._take, self._on_exit, self._context = take, on_exit, context
        self._sender: Sender | None = None
        self._meeting = make_meeting()
        decoder = msgspec.msgpack.Decoder(FromApi)
        self._receiver = Receiver(context, self._meeting.client, self._meeting.token, decoder)
        order = make_order(index)
        self.child = EngineChild(command, take_line, who="API process", pass_fds=[order.listener_fd])
        meeting = msgspec.structs.replace(self._meeting, client=self._receiver.endpoint)
        order = msgspec.structs.replace(order, meeting=meeting, beat_fd=self.child.beat_fd)
        self.child.give_order(msgspec.json.encode(order))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._receiver.fileno(), self._receive)
        self._loop.add_reader(self.child.exit_fd, self._exited)

    @property
    def is_connected(self) -> bool:
        return self._sender is not None and not self.is_gone

    def send(self, message: ToApi) -> None:
        if self._sender is not None and not self.is_gone:
            self._sender.send(message)

    def look(self) -> None:
        """Once a tick: end a process that stands still, which would keep what it has accepted."""
        if not self.is_gone and self.child.stands_still(STILL_AFTER if self.is_serving else STILL_AFTER_STARTING):
            logger.error("the API process %d stands still and is ended", self.child.pid)
            self.child.order_kill()

    def _receive(self) -> None:
        while not self.is_gone:
            try:
                message = self._receiver.receive()
            except UndecodableError as error:
                self._refuse(error)
                continue
            if message is None:
                return
            if isinstance(message, Joined):
                self._sender = Sender(self._context, message.endpoint, self._meeting.token)
            self._take(self, message)

    def _refuse(self, error: UndecodableError) -> None:
        """A request that is not what it claims to be fails alone."""
        logger.error("a message of the API process %d cannot be understood: %s", self.child.pid, error)
        content = error.content
        if isinstance(content, dict) and "request_id" in content:
            why = f"the engine cannot understand it: {error}"
            self.send(EngineOutputs([EngineOutput(str(content["request_id"]), [], finish_reason="error", error=why)]))

    def _exited(self) -> None:
        if self.is_gone:
            return
        self._receive()  # what it said last
        self.is_gone = True
        self._loop.remove_reader(self._receiver.fileno())
        self._loop.remove_reader(self.child.exit_fd)
        if self._sender is not None:
            self._sender.close()
        self._receiver.close()
        self._meeting.remove()
        self._on_exit(self)
        self.child.close()


class StateSource(Protocol):
    """The parts of a supervisor whose state API processes get."""

    @property
    def engine(self) -> AsyncEngine: ...

    def health(self) -> HealthWords: ...


class HealthWords(Protocol):
    @property
    def status(self) -> str: ...

    @property
    def detail(self) -> str: ...


LaunchProcess = Callable[
    [int, Callable[[ApiProcess, FromApi], None], Callable[[ApiProcess], None], "zmq.Context[zmq.Socket[bytes]]"],
    ApiProcess,
]


class ApiProcesses:
    """Everything is called on one event loop. `serve` has the face of a uvicorn server."""

    def __init__(self, num_processes: int, launch: LaunchProcess, observer: Observer, max_restarts: int) -> None:
        """`observer` hears what all processes count. `max_restarts` are of a process that dies before it serves."""
        self.should_exit = False
        self.force_exit = False
        self.source: StateSource | None = None
        self._num_processes = num_processes
        self._launch = launch
        self._observer = observer
        self._max_restarts = max_restarts
        self._engine: RelayEngine | None = None
        self._epoch = 0
        self._living: dict[int, ApiProcess] = {}
        self._deaths = [0] * num_processes  # in a row, of processes that never served
        self._due: dict[int, float] = {}  # when to launch a process again, on the monotonic clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._error: QuireError | None = None
        self._draining: str | None = None
        self._flush_ids = count()
        self._flushed: dict[tuple[int, ApiProcess], asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Event()

    def make_engine(self, client: EngineClient, text: TextModel, *, observer: Observer) -> AsyncEngine:
        """For the supervisor: the engine that requests of the processes go to."""
        self._engine = RelayEngine(client, text, observer=observer)
        self._epoch += 1
        return self._engine

    @property
    def num_requests(self) -> int:
        """Completions that run or wait."""
        return 0 if self._engine is None else self._engine.num_requests

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Keep the processes running until `should_exit`; raises why if they cannot serve."""
        self._due = dict.fromkeys(range(self._num_processes), 0.0)
        looked_at = 0.0
        try:
            while not self.should_exit:
                if self._error is not None:
                    raise self._error
                now = time.monotonic()
                self._launch_due(now)
                self.tell_state()
                if now - looked_at >= TICK:
                    looked_at = now
                    for process in self._living.values():
                        process.look()
                await asyncio.sleep(_STATE_INTERVAL)
        finally:
            self.should_exit = True
            await self._end()

    async def end_answers(self) -> None:
        """Each process has ended its own."""

    async def wait_serving(self) -> None:
        """Wait until every process accepts connections and has an engine for them."""
        while sum(process.is_serving for process in self._living.values()) < self._num_processes:
            await self._turn.wait()

    def tell_state(self) -> None:
        """Tell processes how the engine is, if they have not heard it."""
        if self.source is None:
            return
        health, engine = self.source.health(), self._engine
        unavailable, retry_after = None, 0.0
        try:
            _ = self.source.engine  # raises why there is none
        except EngineUnavailableError as error:
            unavailable, retry_after = str(error), error.retry_after
        has_engine = engine is not None and not engine.is_dead
        state = ProviderState(
            health.status,
            health.detail,
            logging.getLogger(ROOT_NAME).level,
            unavailable,
            retry_after,
            epoch=self._epoch,
        )
        if engine is not None and has_engine:
            stats = msgspec.structs.replace(engine.stats, expert_load={})
            state = msgspec.structs.replace(state, info=engine.info, stats=stats)
        for process in self._living.values():
            if process.is_connected and process.told != state:
                process.told = state
                process.send(state)

    async def flush(self) -> None:
        """Let the observer have what all processes have counted until now."""
        waiting: dict[tuple[int, ApiProcess], asyncio.Future[None]] = {}
        for process in self._living.values():
            if process.is_connected:
                key = (next(self._flush_ids), process)
                waiting[key] = self._flushed[key] = asyncio.get_running_loop().create_future()
                process.send(Flush(key[0]))
        if waiting:
            await asyncio.wait(waiting.values(), timeout=_FLUSH_LIMIT)
        for key in waiting:
            self._flushed.pop(key, None)

    async def drain(self, reason: str, limit: float) -> bool:
        """Let all take no more requests; whether their open streams ended within `limit` seconds."""
        self._draining, end = reason, time.monotonic() + limit
        self._due.clear()  # one that comes now would have nothing to do
        for process in self._living.values():
            process.send(Drain(reason))
        while not all(process.is_drained for process in self._living.values() if process.is_connected):
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self._turn.wait(), left)
            except TimeoutError:
                return False
        return True

    def _launch_due(self, now: float) -> None:
        for index in [index for index, at in self._due.items() if at <= now]:
            del self._due[index]
            try:
                self._living[index] = self._launch(index, self._take, self._on_exit, self._context)
            except OSError as error:
                self._error = EngineDeadError(f"API process {index} cannot be launched: {error}")

    def _take(self, process: ApiProcess, message: FromApi) -> None:
        match message:
            case EngineRequest():
                self._relay(message, process)
            case AbortRequests():
                if self._engine is not None:
                    self._engine.relay_abort(message.request_ids, process)
            case Counted():
                self._count(message)
            case Command():
                if self._engine is not None:
                    task = asyncio.ensure_future(self._engine.obey(message, process))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            case Flushed():
                if (waiting := self._flushed.pop((message.id, process), None)) is not None and not waiting.done():
                    waiting.set_result(None)
            case Failed():
                self._error = ConfigError(message.cause)
            case Joined():
                self.tell_state()
                if self._draining is not None:
                    process.send(Drain(self._draining))
            case Serving():
                process.is_serving, self._deaths[process.index] = True, 0
                logger.info(
                    "API process %d is ready, %d of %d", process.child.pid, process.index, self._num_processes
                )
                self._tell_turn()
            case Drained():
                process.is_drained = True
                self._tell_turn()

    def _relay(self, request: EngineRequest, process: ApiProcess) -> None:
        try:
            if self._engine is None:
                raise EngineDeadError("there is no engine")
            self._engine.relay(request, process)
        except EngineError as error:
            failed = EngineOutput(request.request_id, [], finish_reason="error", error=str(error))
            process.send(EngineOutputs([failed]))

    def _count(self, counted: Counted) -> None:
        if counted.tokens is not None:
            self._observer.on_tokens(counted.tokens)
        for request in counted.requests:
            self._observer.on_request_end(request)
        for call in counted.calls:
            self._observer.on_http_end(call)

    def _on_exit(self, process: ApiProcess) -> None:
        """Abort what a dead process has open, and launch it again unless the server drains or ends."""
        index = process.index
        del self._living[index]
        if self._engine is not None:
            self._engine.forget(process)
        for key in [key for key in self._flushed if key[1] is process]:
            self._flushed.pop(key).cancel()
        self._tell_turn()
        if self.should_exit or self._error is not None:
            return
        cause = process.child.cause_of_death()
        if self._draining is not None:
            logger.error("%s; the server is stopping, so API process %d is not launched again", cause, index)
            return
        self._deaths[index] += not process.is_serving
        if self._deaths[index] > self._max_restarts:
            self._error = EngineDeadError(f"API process {index} does not come up: {cause}")
            return
        deaths = self._deaths[index]
        wait = min(_MOST_BACKOFF, _BACKOFF * 2 ** (deaths - 1)) if deaths else 0.0
        logger.error("%s; API process %d is launched again in %.1f s", cause, index, wait)
        self._due[index] = time.monotonic() + wait

    def _tell_turn(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    async def _end(self) -> None:
        self._due.clear()
        self.tell_state()  # the reason why streams have ended
        children = [process.child for process in self._living.values()]
        stop = [
            asyncio.to_thread(child.kill) if self.force_exit else asyncio.to_thread(child.stop, _STOP_GRACE)
            for child in children
        ]
        await asyncio.gather(*stop)
        while self._living:  # their ends are noticed by the event loop
            await self._turn.wait()
        self._context.destroy(linger=0)


class ServedByProcesses:
    """A supervisor of the engine together with the processes in front of it, for `serve`."""

    def __init__(self, supervisor: Supervisor, processes: ApiProcesses, drain_timeout: float) -> None:
        self._supervisor, self._processes, self._drain_timeout = supervisor, processes, drain_timeout

    async def start(self) -> None:
        await self._supervisor.start()
        await self._processes.wait_serving()

    async def wait_failed(self) -> EngineError:
        return await self._supervisor.wait_failed()

    async def drain(self) -> bool:
        """Both wait: a request may be on its way from a process when the engine is idle."""
        draining = asyncio.ensure_future(self._supervisor.drain())
        try:
            drained = await self._processes.drain(
                "the engine is draining: the server is stopping", self._drain_timeout
            )
            return await draining and drained
        finally:
            draining.cancel()

    async def stop(self) -> None:
        await self._supervisor.stop()
