"""One KV group over its pool: which cached blocks make a hit, and which entries of a table get blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from quire.kv.block_pool import Block, BlockPool
from quire.kv.kinds import GroupKind


class Group:
    """The same verbs for every kind; the kind says which blocks are needed."""

    __slots__ = ("_cached", "first_needed", "index", "kind", "pool", "sparse")

    def __init__(self, index: int, kind: GroupKind, pool: BlockPool) -> None:
        self.index = index
        self.kind = kind
        self.pool = pool
        self.first_needed = kind.first_needed
        self.sparse = kind.sparse
        self._cached = pool.cached[index]

    def may_begin(self, first_hash: bytes) -> bool:
        """Whether there may be a hit, as far as the hash of the first block tells."""
        return self.kind.releases or first_hash in self._cached

    def longest_hit(self, hashes: Sequence[bytes], limit: int) -> list[Block]:
        """The table of a request that starts after the longest cached prefix of at most `limit` blocks.

        Entries that are not needed after it are the null block.
        """
        cached = self._cached
        if not self.kind.releases:  # every block is needed
            if limit == 0 or hashes[0] not in cached:
                return []
            found = list(map(cached.get, hashes[:limit]))
            if None in found:
                found = found[: found.index(None)]
            return cast("list[Block]", found)
        size, end = self.kind.block_size, limit
        needed = self.first_needed(end * size)
        index = end - 1
        while index >= needed:
            if hashes[index] not in cached:
                end = index
                needed = self.first_needed(end * size)
            index -= 1
        first = min(end, needed)
        return [self.pool.null_block] * first + [cached[block_hash] for block_hash in hashes[first:end]]

    def num_new(self, first: int, last: int, marks: Collection[int]) -> int:
        """How many blocks `extend` would take."""
        return len(self.kind.entries(first, last, marks))

    def extend(self, first: int, last: int, marks: Collection[int]) -> list[Block]:
        """Blocks for the entries [first, last) of a table. The caller has checked that there are enough."""
        entries = self.kind.entries(first, last, marks)
        blocks = [self.pool.null_block] * (last - first)
        for entry, block in zip(entries, self.pool.allocate(len(entries)), strict=True):
            blocks[entry - first] = block
        return blocks
