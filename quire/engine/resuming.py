"""ResumingClient: one engine to the frontend, whichever process serves it now.

It journals what open requests have been given. When their engine is lost they wait, and so do new ones; the next
engine gets all of them with their tokens and goes on. Whoever reads the outputs sees a pause, and no token twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from quire.engine.client import AsyncClient
from quire.engine.control import REPLY_LIMIT
from quire.engine.journal import Entry, Journal
from quire.types.errors import EngineDeadError, EngineError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.utils.log import get_logger

logger = get_logger(__name__)

_SHUT_DOWN = "the engine was shut down"


class MortalClient(Protocol):
    """A client whose engine may die; ZmqClient is one."""

    @property
    def info(self) -> EngineInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    async def get_outputs_async(self) -> EngineOutputs: ...

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any: ...

    def take_received(self) -> list[EngineOutput]:
        """What the engine has said and nobody has read; does not wait."""
        ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class EngineLoss:
    """What the journal says about the life of an engine that is lost."""

    has_progressed: bool = False
    """Requests got tokens in it."""
    was_trying: bool = False
    """It died of requests that are tried because they may have killed engines before."""
    num_refused: int = 0
    """Requests that are refused from now on, since they died alone, twice."""


class ResumingClient(AsyncClient):
    """`attach` and `lose` are the supervisor's."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self._journal = Journal()
        self._client: MortalClient | None = None
        self._aborting: set[str] = set()  # the engine has a last word to say of these
        self._said: deque[EngineOutputs] = deque()  # to be handed out before anything else
        self._vocabulary: object = None
        self._is_shut_down = False
        self._changed = asyncio.Event()

    async def attach(self, client: MortalClient) -> int:
        """Let an engine serve: it gets all open requests. Returns how many of them another engine had before.

        EngineDeadError if it dies meanwhile; `lose` is then to be called all the same.
        """
        if self._vocabulary is not None:
            await client.call_async("set_vocabulary", self._vocabulary, limit=None)
        self.info = client.info
        self._client = client
        num_resumed = sum(entry.was_submitted for entry in self._journal.to_submit())
        self._submit_waiting()
        self._tell_change()
        return num_resumed

    def lose(self, cause: str, *, is_planned: bool = False) -> EngineLoss:
        """The engine has ended; take in what it said last. Requests that died alone, twice, fail with the cause.

        `is_planned`: it was stopped, which no request is suspected of.
        """
        client, self._client = self._client, None
        if client is None:
            return EngineLoss()
        last = self._journal.take(client.take_received())
        self._aborting.difference_update(output.request_id for output in last if output.finish_reason)
        last += [EngineOutput(name, [], finish_reason="abort") for name in self._aborting]
        self._aborting.clear()
        has_progressed, was_trying = self._journal.has_progressed, self._journal.is_trying
        refused = self._journal.end_life(is_planned=is_planned)
        last += [refused_output(entry, cause) for entry in refused]
        self._said.append(EngineOutputs(last, EngineStats()))
        self._tell_change()
        return EngineLoss(has_progressed, was_trying, len(refused))

    def add_request(self, request: EngineRequest) -> None:
        self._check_usable()
        self._journal.open(request)
        self._submit_waiting()

    def abort(self, request_ids: list[str]) -> None:
        known: list[str] = []
        for name in request_ids:
            entry = self._journal.close(name)
            if entry is None:
                continue
            if entry.is_submitted:
                known.append(name)
            else:
                self._said.append(EngineOutputs([EngineOutput(name, [], finish_reason="abort")]))
        if known and self._client is not None:
            self._aborting.update(known)
            self._client.abort(known)
        self._submit_waiting()
        self._tell_change()

    async def get_outputs_async(self) -> EngineOutputs:
        while True:
            if self._said:
                return self._said.popleft()
            self._check_usable()
            client = self._client
            if client is None:
                await self._wait_change()
                continue
            try:
                batch = await client.get_outputs_async()
            except EngineError:
                if client is self._client:
                    await self._wait_change()  # until the supervisor knows it too
                continue
            return EngineOutputs(self._take(batch.outputs), batch.stats)

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        """What an engine has not answered when it dies is asked of the next one."""
        if verb == "set_vocabulary":
            self._vocabulary = argument
        while True:
            self._check_usable()
            client = self._client
            if client is not None:
                try:
                    return await client.call_async(verb, argument, limit=limit)
                except EngineDeadError as error:
                    logger.debug("%r will be asked of the next engine: %s", verb, error)
            if client is self._client:
                await self._wait_change()

    def has_unfinished(self) -> bool:
        return bool(self._journal or self._said)

    def shutdown(self) -> None:
        """No other engine will come. The one that serves is shut down, too."""
        self._is_shut_down = True
        client, self._client = self._client, None
        if client is not None:
            client.shutdown()
        self._tell_change()

    def _take(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        fresh = self._journal.take(outputs)
        if self._aborting:
            self._aborting.difference_update(output.request_id for output in outputs if output.finish_reason)
        if self._journal.num_waiting:
            self._submit_waiting()
        return fresh

    def _submit_waiting(self) -> None:
        """Send what the engine should have now; what it cannot be sent waits for the next one."""
        if self._client is None:
            return
        for entry in self._journal.to_submit():
            try:
                self._client.add_request(entry.resumed())
            except EngineDeadError:
                return
            self._journal.note_submitted(entry)

    def _check_usable(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError(_SHUT_DOWN)

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self) -> None:
        await self._changed.wait()


def refused_output(entry: Entry, cause: str) -> EngineOutput:
    where = f"after {len(entry.token_ids)} tokens" if entry.token_ids else "before its first token"
    error = (
        f"the engine died twice while it ran this request and no other, {where}; it will not be tried again."
        f" The last death: {cause}"
    )
    return EngineOutput(entry.request.request_id, [], finish_reason="error", error=error)
