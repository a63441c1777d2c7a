"""ZmqClient: an engine in a process of its own, behind the same face as one in this process. Imports no torch."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.engine.child import ENGINE_COMMAND, TICK, EngineChild, TakeLine, print_line
from quire.engine.client import EngineClient
from quire.engine.control import REPLY_LIMIT, Calls, no_reply
from quire.engine.process import EXIT_FAILED, LaunchOrder
from quire.engine.stalls import LOOK_INTERVAL, StallWatch, start_limit
from quire.engine.transport import Receiver, Sender, make_meeting
from quire.types import messages
from quire.types.errors import EngineDeadError, EngineError, EngineStartError
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest

# Seconds for an engine to leave after it was told to; more than it gives a step in flight.
STOP_GRACE = 10.0
# Ticks without a heartbeat after which a process stands still. Steps run outside of Python's lock and cannot stop the
# heartbeats; imports and readers of files may hold it while they wait for a cold disk.
STILL_AFTER, STILL_AFTER_STARTING = 8, 120
# A process that failed has said why, but the message may still be on its way when its end is noticed.
_LAST_WORDS = 0.5

OnPhase = Callable[[messages.StartupPhase], None]


@dataclass(frozen=True)
class PhaseTime:
    name: str
    seconds: float


def ignore_phases(phase: messages.StartupPhase) -> None:
    """Nobody watches the start."""


class ZmqClient(EngineClient):
    """Launches an engine process when it is made; `wait_ready` or `wait_ready_async` comes first.

    Everything is called on one thread; the async face, on one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        child: EngineChild | None = None,
        on_phase: OnPhase = ignore_phases,
        take_line: TakeLine = print_line,
        stall_timeout: float = math.inf,
    ) -> None:
        """`child` is a process that waits for its order, if there is one already; else `command` launches one.

        `on_phase` hears what the start is busy with, `take_line` gets each line of the engine's log. The calls that
        block end with EngineDeadError if the engine stalls for `stall_timeout` seconds; the async ones never do.
        """
        self.stats = EngineStats()
        self.start_phases: list[PhaseTime] = []
        """Once it is ready: where the time went, from the launch on."""
        self._on_phase = on_phase
        self._phase_begins: list[tuple[str, float]] = [("launch", 0.0)]
        self._is_ready = False
        self._dead: EngineError | None = None
        self._is_stopping = False
        self._unfinished: set[str] = set()
        self._progress_at = 0.0
        self.step_at = time.monotonic()  # when the last step was heard of, or else the launch was
        self._stall_timeout = stall_timeout
        self._stalls = StallWatch(self.dump_stacks)
        self._heard_at = time.monotonic()
        self._inbox: deque[EngineOutputs] = deque()
        self._calls = Calls()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._died = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._meeting = make_meeting()
        decoder = msgspec.msgpack.Decoder(messages.FromEngine)
        self._receiver = Receiver(self._context, self._meeting.client, self._meeting.token, decoder)
        self._sender: Sender | None = None
        meeting = msgspec.structs.replace(self._meeting, client=self._receiver.endpoint)
        try:
            self._child = child or EngineChild(command, take_line)
        except OSError:
            self._close_transport()
            raise
        order = LaunchOrder(config, meeting, time.time(), self._child.beat_fd)
        self._child.give_order(msgspec.json.encode(order))
        self._poller = zmq.Poller()
        self._poller.register(self._receiver.socket, zmq.POLLIN)
        self._poller.register(self._child.exit_fd, zmq.POLLIN | zmq.POLLERR)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def parts(self) -> list[ZmqClient]:
        """The engine processes, each of which is judged alone."""
        return [self]

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def lives(self) -> bool:
        """Whether the process is there, also where nobody has waited for its news yet."""
        return self._dead is None and self._child.returncode is None

    def wait_ready(self) -> messages.EngineInfo:
        """Block until the engine takes requests; EngineDeadError if it never will."""
        while not self._is_ready:
            self._check_alive()
            self._wait_unless_stalled(self.seconds_without_news, starts=True)
        return self.info

    async def wait_ready_async(self) -> messages.EngineInfo:
        self._attach()
        while not self._is_ready:
            self._check_alive()
            await self._next_news()
        return self.info

    async def wait_dead(self) -> EngineError:
        """Wait for the engine's end, however it comes; the error says how."""
        self._attach()
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        self._send(request)
        if not self._unfinished:
            self._progress_at = time.monotonic()
        self._unfinished.add(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        if self._dead is None:
            self._send(messages.AbortRequests(list(request_ids)))

    def call(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        self._check_sync("call_async")
        self._check_alive()
        command, future = self._calls.open(verb, argument)
        self._send(command)
        self._heard_at = time.monotonic()  # it may have been idle
        end = None if limit is None else time.monotonic() + limit
        try:
            while not future.done():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise no_reply(verb, limit)
                if left is None:
                    self._wait_unless_stalled(self.seconds_without_news, starts=True)
                else:
                    self._wait_for_news(left)
            return future.result()
        finally:
            self._calls.close(command)

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        self._attach()
        self._check_alive()
        command, future = self._calls.open(verb, argument)
        self._send(command)
        return await self._calls.wait_async(command, future, limit)

    def has_unfinished(self) -> bool:
        return bool(self._unfinished or self._inbox)

    def seconds_without_step(self) -> float:
        """How long unfinished requests have seen no step end; 0 when nobody waits for one."""
        self._receive()  # a busy event loop is not a stalled engine: first hear what has arrived meanwhile
        return time.monotonic() - self._progress_at if self._unfinished else 0.0

    def forgive_stall(self) -> None:
        """Count the time without a step from now on: the engine was held on purpose."""
        self._progress_at = time.monotonic()

    def seconds_without_news(self) -> float:
        """How long the engine has said nothing at all."""
        self._receive()
        return time.monotonic() - self._heard_at

    def dump_stacks(self) -> None:
        """Have the engine write to its log what each of its threads is doing."""
        if self._dead is None:
            self._child.dump_stacks()

    def get_outputs(self) -> EngineOutputs:
        self._check_sync("get_outputs_async")
        while not self._inbox:
            self._check_alive()
            if not self._unfinished:
                return EngineOutputs([])
            self._wait_unless_stalled(self.seconds_without_step)
        return self._inbox.popleft()

    async def get_outputs_async(self) -> EngineOutputs:
        self._attach()
        while not self._inbox:
            self._check_alive()
            await self._next_news()
        return self._inbox.popleft()

    def take_received(self) -> list[EngineOutput]:
        """What the engine has said and nobody has read; does not wait."""
        self._receive()
        outputs = [output for batch in self._inbox for output in batch.outputs]
        self._inbox.clear()
        return outputs

    def end(self, cause: str) -> None:
        """End a process that is of no use any more, at once; all who wait hear the cause. Does not block."""
        self._receive()
        self._die(EngineDeadError(cause))
        self._child.order_kill()

    async def stop_async(self) -> None:
        """End the process without blocking the event loop; `shutdown` is quick afterwards."""
        self._is_stopping = True
        await asyncio.to_thread(self._child.stop, STOP_GRACE)

    def shutdown(self) -> None:
        self._is_stopping = True
        self._child.stop(STOP_GRACE)
        self._die(EngineDeadError("the engine was shut down"))
        self._close()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise type(self._dead)(str(self._dead)) from self._dead

    def _send(self, message: messages.ToEngine) -> None:
        assert self._sender is not None, "the engine was not waited for; call wait_ready first"
        self._sender.send(message)

    def _check_sync(self, instead: str) -> None:
        if self._event_loop is not None:
            raise EngineError(f"this engine is driven asynchronously; use {instead}")

    def _wait_for_news(self, limit: float | None = None) -> None:
        """Block until something has arrived or happened, at most `limit` seconds."""
        wait = TICK if limit is None else min(TICK, limit)
        events = dict(self._poller.poll(math.ceil(1000 * wait)))
        self._receive()
        if self._child.exit_fd in events:
            self._on_exit()
        elif not events and wait == TICK:
            self._look()

    def _wait_unless_stalled(self, silent: Callable[[], float], *, starts: bool = False) -> None:
        """Block until something has happened, or for a while; EngineDeadError if the engine has stalled."""
        self._wait_for_news(None if self._stall_timeout == math.inf else min(LOOK_INTERVAL, self._stall_timeout / 2))
        limit = start_limit(self._stall_timeout) if starts else self._stall_timeout
        self._stalls.look(silent(), limit, "it has said nothing" if starts else "no step has finished")

    def _attach(self) -> None:
        """Let the running event loop tell of messages and of the process's end."""
        event_loop = asyncio.get_running_loop()
        if self._event_loop is event_loop or self._dead is not None:
            return
        if self._event_loop is not None:
            raise EngineError("this engine is in use on another event loop; call it there")
        self._event_loop = event_loop
        event_loop.add_reader(self._receiver.fileno(), self._receive)
        event_loop.add_reader(self._child.exit_fd, self._on_exit)
        event_loop.call_later(TICK, self._keep_looking)
        self._receive()  # what came before is not announced again

    def _detach(self) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.remove_reader(self._receiver.fileno())
            self._event_loop.remove_reader(self._child.exit_fd)

    def _keep_looking(self) -> None:
        self._look()
        if self._dead is None and self._event_loop is not None:
            self._event_loop.call_later(TICK, self._keep_looking)

    def _look(self) -> None:
        """Once a tick: end a process that stands still. A slow step is none: its process beats on."""
        limit = STILL_AFTER if self._is_ready else STILL_AFTER_STARTING
        if self._dead is None and self._child.stands_still(limit):
            self.end(f"the engine process {self.pid} stands still: it gave no heartbeat for {limit * TICK:g} s")

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _receive(self) -> None:
        """Take in all that has arrived."""
        while self._dead is None and (message := self._receiver.receive()) is not None:
            self._take(message)
        self._news.set()

    def _take(self, message: messages.FromEngine) -> None:
        self._heard_at = time.monotonic()
        match message:
            case EngineOutputs():
                self._progress_at = self.step_at = self._heard_at
                self._unfinished.difference_update(o.request_id for o in message.outputs if o.finish_reason)
                if message.stats is not None:
                    self.stats = message.stats
                self._inbox.append(message)
            case messages.Reply():
                self._calls.settle(message)
            case messages.StartupPhase():
                if message.name != self._phase_begins[-1][0]:
                    self._phase_begins.append((message.name, message.at))
                self._on_phase(message)
            case messages.Hello():
                self._sender = Sender(self._context, message.endpoint, self._meeting.token)
            case messages.Ready():
                begins = [*self._phase_begins, ("ready", message.at)]
                self.start_phases = [PhaseTime(name, end - begin) for (name, begin), (_, end) in pairwise(begins)]
                self.info = message.info
                self._is_ready = True
            case messages.EngineFailure():
                self._die((EngineStartError if message.is_permanent else EngineDeadError)(message.cause))

    def _on_exit(self) -> None:
        """The process is gone: read what it said last, then tell whoever waits."""
        self._receive()
        if self._dead is None and self._child.returncode == EXIT_FAILED:
            self._receiver.socket.poll(int(_LAST_WORDS * 1000))
            self._receive()
        cause = "the engine was shut down" if self._is_stopping else self._child.cause_of_death()
        self._die(EngineDeadError(cause))
        self._detach()

    def _die(self, error: EngineError) -> None:
        self._dead = self._dead or error
        self._calls.fail_all(self._dead)
        self._news.set()
        self._died.set()

    def _close(self) -> None:
        if self._context.closed:
            return
        self._detach()
        self._close_transport()
        self._child.close()

    def _close_transport(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._receiver.close()
        self._context.term()
        self._meeting.remove()
