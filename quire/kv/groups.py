"""One KV group's rules over the shared pool: which cached blocks make a hit, and which blocks it may let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire.kv.block_pool import Block, BlockPool
from quire.kv.layout import KVGroup


class FullGroup:
    """Layers that attend to everything before: a hit needs every block, and none is let go."""

    def __init__(self, group: KVGroup, pool: BlockPool) -> None:
        self.index = group.index
        self._cached = pool.cached[group.index]

    def find(self, hashes: Sequence[bytes], limit: int) -> list[Block]:
        """The cached blocks of the longest prefix, at most `limit` blocks."""
        cached = self._cached
        if limit == 0 or hashes[0] not in cached:
            return []
        found = list(map(cached.get, hashes[:limit]))
        if None in found:
            found = found[: found.index(None)]
        return cast("list[Block]", found)


class SlidingGroup:
    """Layers that see a window: a hit needs the blocks in sight of its end, older entries are the null block."""

    def __init__(self, group: KVGroup, pool: BlockPool, block_size: int) -> None:
        assert group.window is not None
        self.index = group.index
        self._window = group.window
        self._block_size = block_size
        self._cached = pool.cached[group.index]
        self._null = pool.null_block

    def first_visible(self, num_computed_tokens: int) -> int:
        """The first block that the token after these, or any later one, can see."""
        return max(0, num_computed_tokens - self._window + 1) // self._block_size

    def longest_hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """The most blocks, at most `limit`, that a request with these hashes can start from."""
        cached = self._cached
        end = limit
        needed = self.first_visible(end * self._block_size)
        index = end - 1
        while index >= needed:
            if hashes[index] not in cached:
                end = index
                needed = self.first_visible(end * self._block_size)
            index -= 1
        return end

    def hit_blocks(self, hashes: Sequence[bytes], count: int) -> list[Block]:
        """The table of a request that starts after a hit of `count` blocks."""
        cached = self._cached
        first = min(count, self.first_visible(count * self._block_size))
        return [self._null] * first + [cached[block_hash] for block_hash in hashes[first:count]]
