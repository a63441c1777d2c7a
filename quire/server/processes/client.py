"""The engine as an API process sees it: requests, outputs and health go through the process that launched it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from quire.engine.client import AsyncClient
from quire.engine.control import REPLY_LIMIT, Calls
from quire.engine.transport import Meeting, Receiver, Sender
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.metrics.stats import HttpEnd, Observer, RequestEnd, TokenEvent
from quire.server.processes.messages import (
    Counted,
    Drain,
    Drained,
    Flush,
    Flushed,
    FromApi,
    Joined,
    ProviderState,
    Serving,
    StreamsEnded,
    ToApi,
)
from quire.types.errors import EngineDeadError, EngineError, EngineUnavailableError
from quire.types.messages import AbortRequests, EngineInfo, Reply
from quire.types.outputs import EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.utils.log import ROOT_NAME

_LINGER = 1.0  # seconds for the last messages to leave

Send = Callable[[FromApi], None]


class RelayedClient(AsyncClient):
    """One engine, until its streams are ended; restarts of its process are not seen here."""

    def __init__(self, info: EngineInfo, send: Send) -> None:
        self.info = info
        self._send = send
        self._unfinished: set[str] = set()
        self._inbox: deque[EngineOutputs] = deque()
        self._stats: EngineStats | None = None  # not handed out yet
        self._news = asyncio.Event()
        self._calls = Calls()
        self._dead: str | None = None

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        self._unfinished.add(request.request_id)
        self._send(request)

    def abort(self, request_ids: list[str]) -> None:
        if self._dead is None:
            self._send(AbortRequests(list(request_ids)))

    async def get_outputs_async(self) -> EngineOutputs:
        while True:
            if self._inbox:
                return self._inbox.popleft()
            if self._stats is not None:
                stats, self._stats = self._stats, None
                return EngineOutputs([], stats)
            self._check_alive()
            self._news.clear()
            await self._news.wait()

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        """The vocabulary is set by the process that has the engine, which has it already: it is not sent."""
        if verb != "set_vocabulary":
            raise EngineError(f"{verb!r} is not for an API process of several; use the admin surface")
        self._check_alive()
        command, future = self._calls.open(verb, None)
        self._send(command)
        return await self._calls.wait_async(command, future, limit)

    def has_unfinished(self) -> bool:
        return bool(self._unfinished or self._inbox)

    def take(self, message: EngineOutputs | Reply) -> None:
        if isinstance(message, Reply):
            self._calls.settle(message)
            return
        self._unfinished.difference_update(output.request_id for output in message.outputs if output.finish_reason)
        self._inbox.append(message)
        self._news.set()

    def take_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        self._news.set()

    def fail(self, reason: str) -> None:
        """No more outputs will come. What was sent and is still on its way must not run for nobody."""
        if self._dead is None:
            if self._unfinished:
                self._send(AbortRequests(sorted(self._unfinished)))
            self._dead = reason
            self._calls.fail_all(EngineDeadError(reason))
            self._news.set()

    def shutdown(self) -> None:
        self.fail("the engine was shut down")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)


class EventsToParent(Observer):
    """Gathers what requests and HTTP calls bring; all metrics are counted in the parent, so a scrape is the sum.

    What the engine itself says is heard there already.
    """

    def __init__(self) -> None:
        self._tokens: TokenEvent | None = None
        self._requests: list[RequestEnd] = []
        self._calls: list[HttpEnd] = []

    def on_tokens(self, event: TokenEvent) -> None:
        sums = self._tokens
        if sums is None:
            self._tokens = event
            return
        sums.num_generation_tokens += event.num_generation_tokens
        sums.num_prompt_tokens += event.num_prompt_tokens
        sums.num_cached_tokens += event.num_cached_tokens
        sums.first_token_latencies += event.first_token_latencies
        for latency, count in event.token_latencies.items():
            sums.token_latencies[latency] = sums.token_latencies.get(latency, 0) + count

    def on_request_end(self, event: RequestEnd) -> None:
        self._requests.append(event)

    def on_http_end(self, event: HttpEnd) -> None:
        self._calls.append(event)

    def take(self) -> Counted | None:
        """What is new since the last call; None: nothing."""
        if self._tokens is None and not self._requests and not self._calls:
            return None
        counted = Counted(self._tokens, self._requests, self._calls)
        self._tokens, self._requests, self._calls = None, [], []
        return counted


@dataclass(frozen=True)
class RelayedHealth:
    status: str
    detail: str


class RelayedProvider:
    """An EngineProvider whose supervisor is in the parent. Everything is called on one event loop."""

    def __init__(self, meeting: Meeting) -> None:
        self.events = EventsToParent()
        self._is_listening = False
        self._text: TextModel | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        decoder = msgspec.msgpack.Decoder(ToApi)
        self._receiver = Receiver(self._context, meeting.engine, meeting.token, decoder)
        self._sender = Sender(self._context, meeting.client, meeting.token)
        self._state = ProviderState("starting", "the engine has not been started", 0, "the engine is starting", 2.0)
        self._draining: str | None = None
        self._drain: asyncio.Task[None] | None = None
        self._client: RelayedClient | None = None
        self._engine: AsyncEngine | None = None
        self._has_served = False
        self.send: Send = self._sender.send

    def attach(self, text: TextModel) -> None:
        """Say where this process is to be told things, and listen."""
        self._text = text
        asyncio.get_running_loop().add_reader(self._receiver.fileno(), self._receive)
        self.send(Joined(self._receiver.endpoint))
        self._receive()

    @property
    def engine(self) -> AsyncEngine:
        state = self._state
        if self._draining is not None:
            raise EngineUnavailableError(self._draining)
        if state.unavailable is not None or self._engine is None:
            raise EngineUnavailableError(state.unavailable or "the engine is starting", state.retry_after)
        return self._engine

    def health(self) -> RelayedHealth:
        return RelayedHealth(self._state.status, self._state.detail)

    def flush(self) -> None:
        if (counted := self.events.take()) is not None:
            self.send(counted)

    def note_listening(self) -> None:
        """Connections are accepted from now on."""
        self._is_listening = True
        self._say_serving()

    def close(self) -> None:
        """Let the last messages leave."""
        if self._drain is not None:
            self._drain.cancel()
        asyncio.get_running_loop().remove_reader(self._receiver.fileno())
        self.flush()
        self._receiver.close()
        self._sender.close(_LINGER)
        self._context.term()

    def _receive(self) -> None:
        while (message := self._receiver.receive()) is not None:
            self._take(message)

    def _take(self, message: ToApi) -> None:
        match message:
            case EngineOutputs() | Reply():
                if self._client is not None:
                    self._client.take(message)
            case ProviderState():
                self._set_state(message)
            case StreamsEnded():
                self.end_streams(message.reason)
            case Flush():
                self.flush()
                self.send(Flushed(message.id))
            case Drain():
                self._draining = message.reason
                self._drain = asyncio.create_task(self._say_drained(), name="quire-drain")

    def _set_state(self, state: ProviderState) -> None:
        before, self._state = self._state, state
        if state.log_level != before.log_level:
            logging.getLogger(ROOT_NAME).setLevel(state.log_level)
        if state.info is None:
            return
        if self._client is None or self._engine is None or state.epoch != before.epoch:
            assert self._text is not None, "attach comes first"
            self.end_streams("another engine has taken its place")
            self._client = RelayedClient(state.info, self.send)
            self._engine = AsyncEngine(self._client, self._text, observer=self.events)
        elif state.info != before.info:
            self._client.info = state.info
            self._engine.note_restart()
        self._client.take_stats(state.stats)
        self._say_serving()

    def _say_serving(self) -> None:
        if self._is_listening and self._engine is not None and not self._has_served:
            self._has_served = True
            self.send(Serving())

    def end_streams(self, reason: str) -> None:
        """End what is open, with the reason."""
        client, engine, self._client, self._engine = self._client, self._engine, None, None
        if client is not None and engine is not None:
            client.fail(reason)
            engine.shutdown(reason)

    async def _say_drained(self) -> None:
        if self._engine is not None:
            await self._engine.wait_idle()
        self.send(Drained())
