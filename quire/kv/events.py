"""What happens to cached blocks, told to whoever listens. By default nobody does."""

from __future__ import annotations


class NullEventSink:
    """Nobody listens. Called on the scheduler's thread, so one that does must be quick and must not block."""

    def stored(self, group: int, block_hash: bytes, block_id: int) -> None:
        """A full block can be found by its hash from now on."""

    def evicted(self, group: int, block_hash: bytes, block_id: int) -> None:
        """A block can no longer be found: it is about to be overwritten, or the cache was reset."""
