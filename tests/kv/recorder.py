"""Keeps what a block pool tells, for tests to look at."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KVEvent:
    group: int
    block_hash: bytes
    is_cached: bool


@dataclass
class Recorder:
    """Keeps every event, in order."""

    events: list[KVEvent] = field(default_factory=list)

    def __call__(self, group: int, block_hash: bytes, is_cached: bool) -> None:
        self.events.append(KVEvent(group, block_hash, is_cached))
