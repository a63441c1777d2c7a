"""Keeps what a block pool tells, for tests to look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.kv.block_pool import EventSink


@dataclass(frozen=True, slots=True)
class KVEvent:
    kind: Literal["stored", "evicted"]
    group: int
    block_hash: bytes
    block_id: int


@dataclass
class RecordingEventSink(EventSink):
    """Keeps every event, in order."""

    events: list[KVEvent] = field(default_factory=list)

    def stored(self, group: int, block_hash: bytes, block_id: int) -> None:
        self.events.append(KVEvent("stored", group, block_hash, block_id))

    def evicted(self, group: int, block_hash: bytes, block_id: int) -> None:
        self.events.append(KVEvent("evicted", group, block_hash, block_id))
