"""Where responses are kept for later requests: an interface, and a bounded store in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from quire.server.openai.responses.items import Item
from quire.server.openai.responses.protocol import Response


@dataclass(slots=True)
class StoredResponse:
    """A response with the items it answered: those of the responses before it, and its own input."""

    response: Response
    context: list[Item]
    input: list[Item]
    num_bytes: int = field(default=0)
    owner: str = ""
    """Who asked, see owner_of; nobody else finds it."""

    def conversation(self) -> list[Item]:
        """Everything that was said, for the response that follows."""
        return [*self.context, *self.input, *msgspec.to_builtins(self.response.output)]


class ResponseStore(ABC):
    """Calls come from one event loop and do not block. What is not found was never kept, deleted, or pushed out."""

    @abstractmethod
    def put(self, stored: StoredResponse) -> None:
        """Keep a response, in place of the one with its id."""

    @abstractmethod
    def get(self, response_id: str) -> StoredResponse | None: ...

    @abstractmethod
    def delete(self, response_id: str) -> bool:
        """Whether it was there."""


class MemoryStore(ResponseStore):
    """Keeps at most `max_responses` and `max_bytes`; the least recently used response goes first."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        self.delete(stored.response.id)
        stored.num_bytes = _size(stored)
        if stored.num_bytes > self._max_bytes:
            return  # it would push out all others and then itself
        self._stored[stored.response.id] = stored
        self.num_bytes += stored.num_bytes
        while self._stored and (len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes):
            self.delete(next(iter(self._stored)))

    def peek(self, response_id: str) -> StoredResponse | None:
        """Like `get`, but does not count as a use."""
        return self._stored.get(response_id)

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._stored.get(response_id)
        if found is not None:
            self._stored.move_to_end(response_id)
        return found

    def delete(self, response_id: str) -> bool:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self.num_bytes -= found.num_bytes
        return found is not None


def _size(stored: StoredResponse) -> int:
    """Bytes of JSON: close enough to what the objects take, and the same everywhere."""
    return len(msgspec.json.encode((stored.response, stored.context, stored.input)))
