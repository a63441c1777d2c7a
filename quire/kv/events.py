"""What happens to cached blocks, told to whoever listens. By default nobody does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol


class KVEventSink(Protocol):
    """Called on the scheduler's thread, so an implementation must be quick and must not block."""

    def stored(self, group: int, block_hash: bytes, block_id: int) -> None:
        """A full block can be found by its hash from now on."""

    def evicted(self, group: int, block_hash: bytes, block_id: int) -> None:
        """A block can no longer be found: it is about to be overwritten, or the cache was reset."""


class NullEventSink:
    def stored(self, group: int, block_hash: bytes, block_id: int) -> None:
        return None

    def evicted(self, group: int, block_hash: bytes, block_id: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class KVEvent:
    kind: Literal["stored", "evicted"]
    group: int
    block_hash: bytes
    block_id: int


@dataclass(slots=True)
class RecordingEventSink:
    """Keeps every event, in order."""

    events: list[KVEvent] = field(default_factory=list)

    def stored(self, group: int, block_hash: bytes, block_id: int) -> None:
        self.events.append(KVEvent("stored", group, block_hash, block_id))

    def evicted(self, group: int, block_hash: bytes, block_id: int) -> None:
        self.events.append(KVEvent("evicted", group, block_hash, block_id))
