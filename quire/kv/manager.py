"""KVCacheManager: gives requests their blocks, finds cached prefixes, and caches what has been computed.

Knows tokens, blocks and table rows (as opaque numbers), never requests' states, queues or tensors. The scheduler
holds a KVSequence per request and a PrefixHit for a moment, and looks into neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from quire.kv.block_pool import Block, BlockPool
from quire.kv.deltas import BlockDeltas
from quire.kv.events import KVEventSink
from quire.kv.groups import FullGroup, SlidingGroup
from quire.kv.hashing import HashChain
from quire.kv.layout import KVLayout, ceil_div
from quire.types.request import EngineRequest


class KVSequence:
    """The blocks and hashes of one request. All groups' tables have equal length; entries may be the null block."""

    __slots__ = ("chain", "num_stored", "num_visible_from", "tables")

    def __init__(self, hash_chain: HashChain | None, num_groups: int) -> None:
        self.chain = hash_chain  # None when prefix caching is off
        self.tables: list[list[Block]] = [[] for _ in range(num_groups)]
        self.num_visible_from = [0] * num_groups  # entries before this one were given back
        self.num_stored = 0  # leading blocks that need no more storing


class PrefixHit:
    """Cached blocks a request can start from. Valid until the next call that allocates."""

    __slots__ = ("num_tokens", "tables")

    def __init__(self, num_tokens: int, tables: list[list[Block]]) -> None:
        self.num_tokens = num_tokens
        self.tables = tables  # by group


class KVCacheManager:
    """`num_blocks` is the size of the cache tensors: it counts block 0, the null block."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        enable_prefix_caching: bool = True,
        events: KVEventSink | None = None,
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks, len(layout.groups), events)
        self._full = [FullGroup(group, self._pool) for group in layout.groups if group.kind == "full"]
        self._sliding = [
            SlidingGroup(group, self._pool, layout.block_size) for group in layout.groups if group.kind == "sliding"
        ]
        self._num_groups = len(layout.groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use: all but the null block."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def open(self, request: EngineRequest) -> KVSequence:
        """Take in a request at its arrival; hash its prompt if that begins with a cached block. Takes no blocks."""
        if not self.enable_prefix_caching:
            return KVSequence(None, self._num_groups)
        chain = HashChain(request, self.block_size)
        if self._begins_cached(chain, request.token_ids):
            chain.extend(request.token_ids, len(request.token_ids))
        return KVSequence(chain, self._num_groups)

    def hash_ahead(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of these tokens now, so that `store` need not; for when there is time."""
        if sequence.chain is not None:
            sequence.chain.extend(token_ids, len(token_ids))

    def find_prefix(self, sequence: KVSequence, token_ids: Sequence[int]) -> PrefixHit:
        """The longest usable cached prefix, at least one token short of `token_ids`. Takes no blocks."""
        if sequence.chain is None:
            return self.no_prefix()
        hashes = sequence.chain.hashes
        count = (len(token_ids) - 1) // self.block_size
        if not self._begins_cached(sequence.chain, token_ids):
            return self.no_prefix()  # the other blocks are hashed while the first step runs
        sequence.chain.extend(token_ids, len(token_ids))
        tables: list[list[Block]] = [[] for _ in sequence.tables]
        for full in self._full:
            tables[full.index] = blocks = full.find(hashes, count)
            count = len(blocks)
        if self._sliding:
            count = self._longest_sliding_hit(hashes, count)
            for sliding in self._sliding:
                tables[sliding.index] = sliding.hit_blocks(hashes, count)
        if len(tables) > 1:
            tables = [table[:count] for table in tables]
        return PrefixHit(count * self.block_size, tables)

    def _begins_cached(self, chain: HashChain, token_ids: Sequence[int]) -> bool:
        """Whether the first block that could be taken from the cache may be there: only that one is hashed."""
        chain.extend(token_ids, min(self.block_size, len(token_ids)))
        return not self._full or bool(self._full[0].find(chain.hashes, int(len(token_ids) > self.block_size)))

    def no_prefix(self) -> PrefixHit:
        return PrefixHit(0, [[] for _ in self.layout.groups])

    def fits_now(self, hit: PrefixHit, num_tokens: int, step_tokens: int, spare: int) -> bool:
        """Whether a request of `num_tokens` that starts from `hit` would leave `spare` blocks free."""
        free_after = self._pool.num_free - spare - self.layout.blocks_for(num_tokens, step_tokens)
        return free_after >= 0 or free_after + _count_blocks(hit, in_use=True) >= 0

    def start(self, sequence: KVSequence, hit: PrefixHit, num_tokens: int, row: int, deltas: BlockDeltas) -> bool:
        """Give a request without blocks those of `hit` and new ones up to `num_tokens`: all, or none and False."""
        num_hit_blocks = hit.num_tokens // self.block_size
        num_new = ceil_div(num_tokens, self.block_size) - num_hit_blocks
        free_after = self._pool.num_free - num_new * self._num_groups
        # Counting the hit's blocks that are free now is needed only when the pool is tight.
        if free_after < num_hit_blocks * self._num_groups and free_after < _count_blocks(hit, in_use=False):
            return False
        if num_hit_blocks:
            sequence.tables = hit.tables
            for group, table in enumerate(hit.tables):
                self._pool.touch(table)
                deltas.set_entries(row, group, 0, table)
            for sliding in self._sliding:
                sequence.num_visible_from[sliding.index] = sliding.first_visible(hit.num_tokens)
            sequence.num_stored = num_hit_blocks
        self._extend(sequence, num_new, row, deltas)
        return True

    def allocate(
        self, sequence: KVSequence, num_certain_tokens: int, num_tokens: int, row: int, deltas: BlockDeltas
    ) -> bool:
        """Make room for the tokens up to `num_tokens`, or change nothing and return False.

        Blocks that no token after the first `num_certain_tokens` can see are given back. Those tokens are computed
        for certain: no step in flight computes one of them, and no result takes one back.
        """
        num_new = ceil_div(num_tokens, self.block_size) - len(sequence.tables[0])
        num_free = self._pool.num_free
        for group in self._sliding:
            num_free += self._count_unseen(sequence, group.index, group.first_visible(num_certain_tokens))
        if num_new * self._num_groups > num_free:
            return False
        for group in self._sliding:
            self._give_back(sequence, group.index, group.first_visible(num_certain_tokens), row, deltas)
        self._extend(sequence, num_new, row, deltas)
        return True

    def capacity(self, sequence: KVSequence) -> int:
        """How many tokens the request's blocks have room for."""
        return len(sequence.tables[0]) * self.block_size

    def store(self, sequence: KVSequence, token_ids: Sequence[int], num_computed_tokens: int) -> int:
        """Cache the full blocks among the first `num_computed_tokens`, which are computed and known.

        Returns the number of computed tokens from which the next call has something to do.
        """
        hash_chain = sequence.chain
        if hash_chain is None:
            return 1 << 62
        num_full = num_computed_tokens // self.block_size
        first = sequence.num_stored
        if num_full > first:
            hash_chain.extend(token_ids, num_full * self.block_size)
            hashes = hash_chain.hashes
            store = self._pool.store
            for group, table in enumerate(sequence.tables):
                for index in range(first, num_full):
                    block = table[index]
                    if block.id and block.block_hash is None:
                        store(block, group, hashes[index])
            sequence.num_stored = num_full
        return (sequence.num_stored + 1) * self.block_size

    def free(self, sequence: KVSequence) -> None:
        """Give back all blocks; the sequence keeps its hashes and can be started again."""
        tables = sequence.tables
        if len(tables) == 1:
            self._pool.release(reversed(tables[0]))
        else:
            # Interleaved, so that eviction takes the same depth from every group: a hit needs all of them.
            self._pool.release(chain.from_iterable(zip(*(reversed(table) for table in tables), strict=True)))
        sequence.tables = [[] for _ in tables]
        sequence.num_visible_from = [0] * len(tables)
        sequence.num_stored = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that nobody uses."""
        self._pool.forget_free()

    def check_integrity(self, sequences: Iterable[KVSequence]) -> None:
        """Raise AssertionError unless the pool is sound and its counts are exactly the uses by `sequences`."""
        self._pool.check_integrity()
        uses = [0] * len(self._pool.blocks)
        for sequence in sequences:
            assert len({len(table) for table in sequence.tables}) == 1, "tables of one request differ in length"
            for table, visible_from in zip(sequence.tables, sequence.num_visible_from, strict=True):
                assert all(block.id == 0 for block in table[:visible_from])
                for block in table[visible_from:]:
                    assert block.id != 0, "a visible entry is the null block"
                    uses[block.id] += 1
        for block in self._pool.blocks:
            assert block.ref_count == uses[block.id], f"{block} has {uses[block.id]} users"

    def _longest_sliding_hit(self, hashes: Sequence[bytes], limit: int) -> int:
        # A shorter hit needs other blocks in sight of its end, so all sliding groups must agree on one length.
        agreed = 0
        while agreed < len(self._sliding):
            agreed = 0
            for sliding in self._sliding:
                shorter = sliding.longest_hit(hashes, limit)
                agreed += shorter == limit
                limit = shorter
        return limit

    def _extend(self, sequence: KVSequence, num_new: int, row: int, deltas: BlockDeltas) -> None:
        if num_new <= 0:
            return
        for group, table in enumerate(sequence.tables):
            blocks = self._pool.allocate(num_new)
            deltas.set_entries(row, group, len(table), blocks)
            table += blocks

    def _count_unseen(self, sequence: KVSequence, group: int, visible_from: int) -> int:
        """How many blocks would be free if this group gave back those that it does not see any more."""
        unseen = sequence.tables[group][sequence.num_visible_from[group] : visible_from]
        return sum(block.ref_count == 1 for block in unseen)

    def _give_back(self, sequence: KVSequence, group: int, visible_from: int, row: int, deltas: BlockDeltas) -> None:
        table = sequence.tables[group]
        first = sequence.num_visible_from[group]
        visible_from = min(visible_from, len(table))
        if visible_from <= first:
            return
        nulls = [self._pool.null_block] * (visible_from - first)
        self._pool.release(reversed(table[first:visible_from]))
        table[first:visible_from] = nulls
        deltas.set_entries(row, group, first, nulls)
        sequence.num_visible_from[group] = visible_from


def _count_blocks(hit: PrefixHit, *, in_use: bool) -> int:
    return sum((block.ref_count > 0) == in_use for table in hit.tables for block in table if block.id)
