"""KVCacheManager: gives requests their blocks, finds cached prefixes, and caches what has been computed.

Knows tokens, blocks and table rows (as opaque numbers), never requests' states, queues or tensors. The scheduler
holds a KVSequence per request and a PrefixHit for a moment, and looks into neither.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain

from quire.kv.block_pool import Block, BlockPool, OnChange
from quire.kv.deltas import BlockDeltas
from quire.kv.groups import Group
from quire.kv.hashing import HashChain
from quire.kv.kinds import MAX_MARKS, ceil_div
from quire.kv.layout import KVLayout
from quire.types.cache import STATE_ROLLBACK
from quire.types.request import EngineRequest


class KVSequence:
    """The blocks and hashes of one request. All groups' tables have equal length; entries may be the null block."""

    __slots__ = ("chain", "marks", "num_stored", "num_visible_from", "tables")

    def __init__(self, hash_chain: HashChain | None, num_groups: int) -> None:
        self.chain = hash_chain  # None when prefix caching is off
        self.tables: list[list[Block]] = [[] for _ in range(num_groups)]
        self.num_visible_from = [0] * num_groups  # entries before this one were given back
        self.num_stored = 0  # leading blocks that need no more storing
        self.marks: tuple[int, ...] = ()  # entries that sparse groups are to cache, see quire/kv/kinds.py


class PrefixHit:
    """Cached blocks a request can start from. Valid until the next call that allocates."""

    __slots__ = ("num_tokens", "num_without_state", "tables")

    def __init__(self, num_tokens: int, tables: list[list[Block]], num_without_state: int = 0) -> None:
        self.num_tokens = num_tokens
        self.tables = tables  # by group
        self.num_without_state = num_without_state  # tokens after these that all groups but those of states have


class _PoolGroups:
    """A pool and the groups that draw from it."""

    __slots__ = ("groups", "indices", "num_groups", "pool")

    def __init__(self, pool: BlockPool, groups: list[Group]) -> None:
        self.pool = pool
        self.groups = [group for group in groups if group.pool is pool]
        self.indices = [group.index for group in self.groups]
        self.num_groups = len(self.groups)

    def free_after(self, first: int, last: int, marks: Sequence[int]) -> int:
        """Blocks that would be left if tables grew from `first` to `last` entries; negative if there are too few."""
        return self.pool.num_free - sum(group.num_new(first, last, marks) for group in self.groups)

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        return sum(group.kind.blocks_for(num_tokens, step_tokens) for group in self.groups)

    def count_unseen(self, sequence: KVSequence, num_tokens: int) -> int:
        """How many blocks would become free if the groups gave back what is not needed after `num_tokens`."""
        unseen = (
            block
            for group in self.groups
            for block in sequence.tables[group.index][
                sequence.num_visible_from[group.index] : group.first_needed(num_tokens)
            ]
        )
        return sum(block.ref_count == 1 for block in unseen)

    def count_blocks(self, hit: PrefixHit, *, in_use: bool) -> int:
        tables = (hit.tables[index] for index in self.indices)
        return sum((block.ref_count > 0) == in_use for table in tables for block in table if block.id)


class KVCacheManager:
    """`num_blocks` is the size of each pool's cache tensors: it counts block 0, the null block.

    A number alone is for layouts of one pool.
    """

    def __init__(self, layout: KVLayout, num_blocks: int | Sequence[int], enable_prefix_caching: bool = True) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.weights = ""  # digest of those that blocks are computed with, once they are others than at the start
        counts = (num_blocks,) if isinstance(num_blocks, int) else num_blocks
        self.listeners: list[OnChange] = []
        pools = [BlockPool(count, len(layout.groups), self.listeners) for count in counts]
        self._groups = [
            Group(group.index, group.rule(layout.block_size), pools[group.pool]) for group in layout.groups
        ]
        self._releasing = [group for group in self._groups if group.kind.releases]
        self._sparse = [group for group in self._groups if group.sparse]
        self._pools = [_PoolGroups(pool, self._groups) for pool in pools]
        self.most_drafts = STATE_ROLLBACK - 1 if self._sparse else 1 << 30  # that a row can take back at once
        assert len(pools) == len(layout.pools), f"{len(pools)} sizes of {len(layout.pools)} pools"

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use: all but the null blocks."""
        return sum(part.pool.num_blocks for part in self._pools)

    @property
    def num_free_blocks(self) -> int:
        return sum(part.pool.num_free for part in self._pools)

    def needed_and_present(self, num_tokens: int, step_tokens: int) -> tuple[int, int]:
        """Blocks that a request of `num_tokens` needs at its peak, and how many there are, in the scarcest pool."""
        counts = [(part.blocks_for(num_tokens, step_tokens), part.pool.num_blocks) for part in self._pools]
        return max(counts, key=lambda count: count[0] - count[1])

    def open(self, request: EngineRequest) -> KVSequence:
        """Take in a request at its arrival; hash its prompt if that begins with a cached block. Takes no blocks."""
        if not self.enable_prefix_caching:
            return KVSequence(None, len(self._groups))
        chain = HashChain(request, self.block_size, self.weights)
        if self._begins_cached(chain, request.token_ids):
            chain.extend(request.token_ids, len(request.token_ids))
        sequence = KVSequence(chain, len(self._groups))
        if self._sparse:  # the longest prefix that a request with the same prompt can start from
            ends = (len(request.token_ids) - 1, *_message_ends(request))
            sequence.marks = tuple(end // self.block_size - 1 for end in ends)
        return sequence

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
        tables: list[list[Block]] = []
        for group in self._groups:
            tables.append(group.longest_hit(hashes, count))
            count = len(tables[-1])
        found = min((len(tables[group.index]) for group in self._groups if not group.sparse), default=count)
        if len(tables) > 1:
            if self._sparse:  # where the others had a longer hit, the next one is to be as long
                sequence.marks = (*sequence.marks[: MAX_MARKS - 1], len(tables[0]) - 1)
            # A shorter hit needs other blocks in sight of its end, so all groups must agree on one length.
            while any(len(table) != count for table in tables):
                for index, group in enumerate(self._groups):
                    if len(tables[index]) != count:
                        tables[index] = group.longest_hit(hashes, count)
                        count = len(tables[index])
        without_state = found - count if self._sparse else 0
        return PrefixHit(count * self.block_size, tables, without_state * self.block_size)

    def _begins_cached(self, chain: HashChain, token_ids: Sequence[int]) -> bool:
        """Whether the first block that could be taken from the cache may be there: only that one is hashed."""
        chain.extend(token_ids, min(self.block_size, len(token_ids)))
        return len(token_ids) > self.block_size and self._groups[0].may_begin(chain.hashes[0])

    def no_prefix(self) -> PrefixHit:
        return PrefixHit(0, [[] for _ in self._groups])

    def fits_now(self, hit: PrefixHit, num_tokens: int, step_tokens: int, spare_share: int) -> bool:
        """Whether a request of `num_tokens` that starts from `hit` would leave a part of each pool free.

        The part is one block of `spare_share`, at least one; 0: none.
        """
        for part in self._pools:
            spare = max(1, part.pool.num_blocks // spare_share) if spare_share else 0
            free_after = part.pool.num_free - spare - part.blocks_for(num_tokens, step_tokens)
            if free_after < 0 and free_after + part.count_blocks(hit, in_use=True) < 0:
                return False
        return True

    def start(self, sequence: KVSequence, hit: PrefixHit, num_tokens: int, row: int, deltas: BlockDeltas) -> bool:
        """Give a request without blocks those of `hit` and new ones up to `num_tokens`: all, or none and False."""
        num_hit_blocks = hit.num_tokens // self.block_size
        end = ceil_div(num_tokens, self.block_size)
        for part in self._pools:
            # Counting the blocks that are needed is needed only when the pool is tight.
            if part.pool.num_free < end * part.num_groups and part.free_after(
                num_hit_blocks, end, sequence.marks
            ) < part.count_blocks(hit, in_use=False):
                return False
        if num_hit_blocks:
            sequence.tables = hit.tables
            for group, table in zip(self._groups, hit.tables, strict=True):
                group.pool.touch(table)
                deltas.set_entries(row, group.index, 0, table)
            for group in self._releasing:
                sequence.num_visible_from[group.index] = group.first_needed(hit.num_tokens)
            sequence.num_stored = num_hit_blocks
        self._extend(sequence, num_hit_blocks, end, sequence.marks, row, deltas)
        return True

    def allocate(
        self,
        sequence: KVSequence,
        num_certain_tokens: int,
        num_tokens: int,
        row: int,
        deltas: BlockDeltas,
        *,
        drafts: bool = False,
    ) -> bool:
        """Make room for the tokens up to `num_tokens`, or change nothing and return False.

        Blocks that no token after the first `num_certain_tokens` can see are given back. Those tokens are computed
        for certain: no step in flight computes one of them, and no result takes one back. With `drafts` the new
        tokens are those, of which any number may hold.
        """
        first, end = len(sequence.tables[0]), ceil_div(num_tokens, self.block_size)
        marks = range(first, end) if drafts else sequence.marks
        for part in self._pools:
            if part.pool.num_free < (end - first) * part.num_groups:  # tight: count what is needed
                free_after = part.free_after(first, end, marks)
                if free_after < 0 and free_after + part.count_unseen(sequence, num_certain_tokens) < 0:
                    return False
        for group in self._releasing:
            self._give_back(sequence, group, group.first_needed(num_certain_tokens), row, deltas)
        self._extend(sequence, first, end, marks, row, deltas)
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
            full = range(first, num_full)
            for group in self._groups:
                table, store = sequence.tables[group.index], group.pool.store
                for index in [mark for mark in sequence.marks if mark in full] if group.sparse else full:
                    block = table[index]
                    if block.id and block.block_hash is None:
                        store(block, group.index, hashes[index], hashes[index - 1] if index else None)
            sequence.num_stored = num_full
        return (sequence.num_stored + 1) * self.block_size

    def free(self, sequence: KVSequence) -> None:
        """Give back all blocks; the sequence keeps its hashes and can be started again."""
        tables, last = sequence.tables, sequence.num_stored - 1
        if sequence.chain is not None and last >= 0:
            for group in self._sparse:  # the next turn of a conversation begins with what this one has computed
                state = tables[group.index][last]
                if state.id and state.block_hash is None:
                    group.pool.store(state, group.index, sequence.chain.hashes[last])
        for part in self._pools:
            if len(part.indices) == 1:
                part.pool.release(reversed(tables[part.indices[0]]))
            else:
                # Interleaved, so that eviction takes the same depth from every group: a hit needs all of them.
                reverse = (reversed(tables[index]) for index in part.indices)
                part.pool.release(chain.from_iterable(zip(*reverse, strict=True)))
        sequence.tables = [[] for _ in tables]
        sequence.num_visible_from = [0] * len(tables)
        sequence.num_stored = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that nobody uses."""
        for part in self._pools:
            part.pool.forget_free()

    @property
    def pools(self) -> list[BlockPool]:
        """For those who look on."""
        return [part.pool for part in self._pools]

    def blocks_of(self, sequence: KVSequence, pool: BlockPool) -> Iterable[Block]:
        """The blocks of a request in a pool, the null block perhaps among them."""
        groups = (group.index for group in self._groups if group.pool is pool)
        return chain.from_iterable(sequence.tables[index] for index in groups)

    def why_missed(self, sequence: KVSequence, num_tokens: int, evicted: Container[bytes]) -> str:
        """Why the block after a hit of `num_tokens` tokens was not in the cache."""
        if sequence.chain is None:
            return "prefix caching is off"
        index = num_tokens // self.block_size
        hashes = sequence.chain.hashes
        if index < len(hashes) and hashes[index] in evicted:
            return "evicted to make room"
        return "differs from every cached prompt" if num_tokens else "first prompt that begins like this"

    def check_integrity(self, sequences: Iterable[KVSequence]) -> None:
        """Raise AssertionError unless the pools are sound and their counts are exactly the uses by `sequences`."""
        uses = {id(part.pool): [0] * len(part.pool.blocks) for part in self._pools}
        for sequence in sequences:
            assert len({len(table) for table in sequence.tables}) == 1, "tables of one request differ in length"
            for group, table in zip(self._groups, sequence.tables, strict=True):
                visible_from = sequence.num_visible_from[group.index]
                assert all(block.id == 0 for block in table[:visible_from])
                assert all(block is group.pool.blocks[block.id] for block in table), "a block of another pool"
                for block in table[visible_from:]:
                    assert block.id != 0 or group.sparse, "a visible entry is the null block"
                    if block.id:
                        uses[id(group.pool)][block.id] += 1
                assert not table or not group.sparse or table[-1].id, "a row has lost its state"
        for part in self._pools:
            part.pool.check_integrity()
            for block in part.pool.blocks:
                count = uses[id(part.pool)][block.id]
                assert block.ref_count == count, f"{block} has {count} users"

    def _extend(
        self, sequence: KVSequence, first: int, end: int, marks: Sequence[int], row: int, deltas: BlockDeltas
    ) -> None:
        if end <= first:
            return
        tables, num_new = sequence.tables, end - first
        for group in self._groups:
            blocks = group.extend(first, end, marks) if group.sparse else group.pool.allocate(num_new)
            deltas.set_entries(row, group.index, first, blocks)
            tables[group.index] += blocks

    def _give_back(
        self, sequence: KVSequence, group: Group, visible_from: int, row: int, deltas: BlockDeltas
    ) -> None:
        table = sequence.tables[group.index]
        first = sequence.num_visible_from[group.index]
        visible_from = min(visible_from, len(table))
        if visible_from <= first:
            return
        nulls = [group.pool.null_block] * (visible_from - first)
        group.pool.release(reversed(table[first:visible_from]))
        table[first:visible_from] = nulls
        deltas.set_entries(row, group.index, first, nulls)
        sequence.num_visible_from[group.index] = visible_from


def _message_ends(request: EngineRequest) -> tuple[int, int]:
    """How many tokens a prompt has up to the ends of its first and of its last message, end tokens included.

    Other conversations may share the first one. Behind the last one the answer is begun, perhaps with thinking, which
    templates drop from the prompt of the next turn.
    """
    tokens = request.token_ids
    ends = [token for token in request.eos_token_ids if token in tokens]
    if not ends:
        return 0, 0
    backwards = tokens[::-1]
    return min(map(tokens.index, ends)) + 1, len(tokens) - min(map(backwards.index, ends))
