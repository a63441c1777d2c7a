"""RelayEngine: what the supervisor keeps where other processes have the streams. Requests go in, outputs go out.

Each output goes to the process that sent its request. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from quire.engine.client import EngineClient
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import TextModel
from quire.metrics.stats import Observer
from quire.server.processes.messages import StreamsEnded, ToApi
from quire.types.errors import EngineError
from quire.types.messages import Command, Reply
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.request import EngineRequest


class Owner(Protocol):
    """A process that requests come from."""

    def send(self, message: ToApi) -> None:
        """Never blocks; a process that is gone hears nothing."""
        ...


class RelayEngine(AsyncEngine):
    """Has requests of others and no streams of its own; what an operator asks of an engine works as in any."""

    def __init__(self, client: EngineClient, text: TextModel, *, observer: Observer) -> None:
        super().__init__(client, text, observer=observer)
        self._owners: dict[str, Owner | None] = {}  # by request; None: its process is gone
        self._told: set[Owner] = set()
        self._drain = asyncio.get_running_loop().create_task(self._drain_outputs(), name="quire-relay")
        self._drain.add_done_callback(self._on_drain_done)

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    @property
    def request_ids(self) -> list[str]:
        return list(self._owners)

    def relay(self, request: EngineRequest, owner: Owner) -> None:
        """Let the engine have a request. Ids hold random digits; the engine must not see one twice all the same."""
        if self._dead is not None:
            return  # its process was told, or will be
        name = request.request_id
        if name in self._owners:
            error = "a request with this id is open in another API process; send it again"
            owner.send(EngineOutputs([EngineOutput(name, [], finish_reason="error", error=error)]))
            return
        self._client.add_request(request)
        self._owners[name] = owner
        self._told.add(owner)
        self._idle.clear()

    def relay_abort(self, request_ids: list[str], owner: Owner) -> None:
        """A process may end its own requests only."""
        known = [name for name in request_ids if self._owners.get(name) is owner]
        if known and self._dead is None:
            self._client.abort(known)

    def forget(self, owner: Owner) -> None:
        """A process is gone: nobody waits for its requests any more."""
        self._told.discard(owner)
        orphans = [name for name, one in self._owners.items() if one is owner]
        self._owners.update(dict.fromkeys(orphans))
        if orphans and self._dead is None:
            self._client.abort(orphans)

    async def obey(self, command: Command, owner: Owner) -> None:
        """Answer the one command that API processes have: the vocabulary is to be set."""
        try:
            await self.prepare_structured_outputs()
        except EngineError as error:
            owner.send(Reply(command.id, error=str(error)))
        else:
            owner.send(Reply(command.id))

    def _hand_out(self, outputs: list[EngineOutput]) -> None:
        by_owner: dict[Owner, list[EngineOutput]] = {}
        for output in outputs:
            ended = output.finish_reason is not None or output.error is not None
            name = output.request_id
            owner = self._owners.pop(name, None) if ended else self._owners.get(name)
            if owner is not None:
                by_owner.setdefault(owner, []).append(output)
        for owner, own in by_owner.items():
            owner.send(EngineOutputs(own))
        if not self._owners:
            self._idle.set()

    def _die(self, reason: str, cause: BaseException | None = None) -> None:
        if self._dead is None:
            super()._die(reason, cause)
            self._owners.clear()
            self._idle.set()
            for owner in self._told:
                owner.send(StreamsEnded(reason))
