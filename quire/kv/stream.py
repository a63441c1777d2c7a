"""CacheStream: which prefixes an engine has cached, as batches of changes, for a router in another process.

Blocks of the last group tell, whose kind needs least of a prefix and therefore decides about a hit. What is undone
before it was told is not told, so there is never more to tell than twice the blocks that there are.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.kv.manager import KVCacheManager
from quire.types.outputs import CacheChanges

_NAME_BYTES = 8  # of a hash: names that collide cost a wrong guess, and nothing else


class CacheStream:
    """The first batch, and one after other weights, is all that is cached."""

    def __init__(self, kv: KVCacheManager) -> None:
        group = kv.layout.groups[-1]
        self._kv, self._group = kv, group.index
        self._cached = kv.pools[group.pool].cached[group.index]
        self._weights: str | None = None  # as told
        self._changes: dict[bytes, bool] = {}  # block's hash -> whether it is cached now
        kv.listeners.append(self._note)

    def _note(self, group: int, block_hash: bytes, is_cached: bool) -> None:
        if group == self._group and self._changes.pop(block_hash, None) is None:
            self._changes[block_hash] = is_cached

    def take(self) -> CacheChanges | None:
        """What has changed since the last call; None: nothing."""
        weights, changes = self._kv.weights, self._changes
        if weights == self._weights and not changes:
            return None
        self._changes = {}
        if weights != self._weights or len(changes) > len(self._cached):  # all of it is shorter
            self._weights = weights
            return CacheChanges(_joined(self._cached), weights=weights)
        stored = [block_hash for block_hash, is_cached in changes.items() if is_cached]
        return CacheChanges(_joined(stored), _joined(changes.keys() - stored))


def block_names(hashes: Iterable[bytes]) -> list[int]:
    """What a router calls the blocks with these hashes."""
    return read_names(_joined(hashes))


def read_names(joined: bytes) -> list[int]:
    return memoryview(joined).cast("Q").tolist()


def _joined(hashes: Iterable[bytes]) -> bytes:
    return b"".join([block_hash[:_NAME_BYTES] for block_hash in hashes])
