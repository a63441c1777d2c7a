"""The pool of KV blocks: who is free, how often each is used, and which cached content each still holds.

Knows blocks and hashes, never requests. The free list is intrusive and doubly linked, so a block leaves its
middle in constant time when a prefix hit revives it. Its head is reallocated first: blocks that hold nothing
are pushed there, so that memory that was never touched stays so as long as it can; blocks that hold cached content
are appended and so are evicted least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.types.errors import ConfigError

OnChange = Callable[[int, bytes, bool], None]
"""Hears of a group's block, by its hash, whether it can be found from now on. On the scheduler's thread: be quick."""


class Block:
    __slots__ = ("block_hash", "group", "id", "next_free", "parent_hash", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None  # set while the block can be found by it
        self.parent_hash: bytes | None = None  # of the block before it, while it can be found
        self.group = -1  # KV group of the cached content
        # Neighbours on the free list; without meaning while the block is in use.
        self.prev_free: Block = self
        self.next_free: Block = self

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.ref_count}, cached={self.block_hash is not None})"


class BlockPool:
    """`num_blocks` counts block 0, the null block, which is never handed out and never freed."""

    def __init__(self, num_blocks: int, num_groups: int, listeners: Sequence[OnChange] = ()) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks} but must be at least 2: block 0 is the null block")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.cached: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        self._listeners = listeners
        # The sentinel closes the list into a ring: next_free is the head, prev_free the tail.
        self._ring = ring = Block(-1)
        for before, block in zip([ring, *self.blocks[1:]], [*self.blocks[1:], ring], strict=True):
            before.next_free = block
            block.prev_free = before
        self.num_free = num_blocks - 1

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out."""
        return len(self.blocks) - 1

    def allocate(self, count: int) -> list[Block]:
        """Take `count` blocks, evicting what they cached. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        ring = self._ring
        taken: list[Block] = []
        block = ring.next_free
        for _ in range(count):
            block.ref_count = 1
            if block.block_hash is not None:
                self._forget(block)
            taken.append(block)
            block = block.next_free
        ring.next_free = block
        block.prev_free = ring
        self.num_free -= count
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Use cached blocks once more; free ones leave the free list. The null block may be among them."""
        revived = 0
        for block in blocks:
            if block.ref_count:
                block.ref_count += 1
            elif block.id:
                before, after = block.prev_free, block.next_free
                before.next_free = after
                after.prev_free = before
                block.ref_count = 1
                revived += 1
        self.num_free -= revived

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one use of each block; the null block may be among them.

        Give a request's blocks last one first: what is released earlier is evicted earlier, and the start of a
        prompt is worth more than its end.
        """
        ring = self._ring
        tail = ring.prev_free
        freed = 0
        for block in blocks:
            count = block.ref_count
            if count > 1:
                block.ref_count = count - 1
                continue
            if block.id == 0:
                continue
            assert count == 1, f"block {block.id} released once too often"
            block.ref_count = 0
            freed += 1
            if block.block_hash is not None:
                tail.next_free = block
                block.prev_free = tail
                tail = block
                continue
            head = ring.next_free
            ring.next_free = head.prev_free = block
            block.next_free = head
            block.prev_free = ring
            if tail is ring:
                tail = block
        tail.next_free = ring
        ring.prev_free = tail
        self.num_free += freed

    def store(self, block: Block, group: int, block_hash: bytes, parent_hash: bytes | None = None) -> None:
        """Make a full block findable. Equal content that is already stored wins: the block stays private."""
        cached = self.cached[group]
        if block_hash in cached:
            return
        assert block.ref_count > 0
        assert block.block_hash is None
        cached[block_hash] = block
        block.block_hash = block_hash
        block.parent_hash = parent_hash
        block.group = group
        for tell in self._listeners:
            tell(group, block_hash, True)

    def forget_free(self) -> None:
        """Forget the cached content of all blocks that nobody uses; they are handed out before untouched ones."""
        forgotten = [block for cached in self.cached for block in cached.values() if block.ref_count == 0]
        for block in forgotten:
            self._forget(block)
        self.touch(forgotten)
        self.release(forgotten)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, free list and cache map disagree."""
        seen: set[int] = set()
        before = self._ring
        while (block := before.next_free) is not self._ring:
            assert block.prev_free is before, f"block {block.id} is linked one way only"
            assert block.ref_count == 0, f"block {block.id} is free with {block.ref_count} uses"
            assert block.id not in seen, f"block {block.id} is on the free list twice"
            seen.add(block.id)
            before = block
        assert self._ring.prev_free is before
        assert len(seen) == self.num_free, f"{len(seen)} blocks on the free list, {self.num_free} counted"
        assert 0 not in seen, "the null block is on the free list"
        assert self.null_block.ref_count == 0
        assert self.null_block.block_hash is None
        num_cached = 0
        for block in self.blocks[1:]:
            assert (block.ref_count == 0) == (block.id in seen), f"{block} is lost"
            if block.block_hash is not None:
                num_cached += 1
                assert self.cached[block.group].get(block.block_hash) is block, f"{block} is not in the cache map"
        assert num_cached == sum(len(cached) for cached in self.cached), "the cache map has stale entries"

    def _forget(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        del self.cached[block.group][block_hash]
        block.block_hash = None
        for tell in self._listeners:
            tell(block.group, block_hash, False)
