"""What the console is shown of the blocks: a map of each pool, and the tree of cached prefixes. Changes nothing.

A look costs a bounded time, however many blocks there are: large pools are scanned in slices, one per look.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from quire.kv.block_pool import Block, BlockPool
from quire.types.console import PoolView, PrefixNode

_MOST_CELLS = 2048  # of a map
_MOST_SCANNED = 6144  # blocks in one look
_MOST_IN_TREE = 4096  # blocks
_MOST_NODES = 96
_MOST_EVICTED = 1 << 16  # hashes that are remembered


class EvictedHashes:
    """Remembers which blocks could be found once."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, None] = {}

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._hashes

    def note(self, group: int, block_hash: bytes, is_cached: bool) -> None:
        self._hashes.pop(block_hash, None)
        if not is_cached:
            self._hashes[block_hash] = None
        if len(self._hashes) > _MOST_EVICTED:
            del self._hashes[next(iter(self._hashes))]


class PoolMap:
    """The map of one pool, refreshed by slices."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._owners = array("i", [-1]) * len(pool.blocks)
        self._cell_blocks = -(-pool.num_blocks // _MOST_CELLS)
        self._num_cells = -(-pool.num_blocks // self._cell_blocks)
        self._states = bytearray(b"0" * self._num_cells)
        self._cell_owners = [-1] * self._num_cells
        self._next_cell = 0

    def own(self, row: int, blocks: Iterable[Block]) -> None:
        """The request in this row uses these blocks."""
        owners = self._owners
        for block in blocks:
            owners[block.id] = row

    def view(self) -> PoolView:
        pool = self._pool
        count = min(self._num_cells, max(1, _MOST_SCANNED // self._cell_blocks))
        for _ in range(count):
            self._look(self._next_cell)
            self._next_cell = (self._next_cell + 1) % self._num_cells
        num_cached = sum(map(len, pool.cached))
        return PoolView(
            pool.num_blocks, pool.num_free, num_cached, self._cell_blocks, self._states.decode(), self._cell_owners[:]
        )

    def _look(self, cell: int) -> None:
        first = 1 + cell * self._cell_blocks  # block 0 is nobody's
        counts = [0, 0, 0, 0]
        owner = -1
        for block in self._pool.blocks[first : first + self._cell_blocks]:
            refs = block.ref_count
            if refs == 1:
                counts[2] += 1
                owner = self._owners[block.id]
            else:
                counts[3 if refs else 1 if block.block_hash is not None else 0] += 1
        state = max(range(3, -1, -1), key=counts.__getitem__)
        self._states[cell] = 48 + state
        self._cell_owners[cell] = owner if state == 2 else -1


def prefix_tree(cached: dict[bytes, Block]) -> tuple[list[PrefixNode], int]:
    """The oldest cached blocks as runs without forks, parents first, and how many blocks are not among them."""
    blocks = list(islice(cached.values(), _MOST_IN_TREE))
    known = {block.block_hash for block in blocks}
    children: dict[bytes | None, list[Block]] = {}
    for block in blocks:
        children.setdefault(block.parent_hash if block.parent_hash in known else None, []).append(block)
    sizes = _sizes(blocks, children)
    nodes: list[PrefixNode] = []
    told = 0
    # Largest first, level by level, so that what is cut off is small.
    coming = deque((block, -1) for block in _by_size(children.get(None, ()), sizes))
    while coming and len(nodes) < _MOST_NODES:
        block, parent = coming.popleft()
        run, below = [block], children.get(block.block_hash, ())
        while len(below) == 1:
            run.append(below[0])
            below = children.get(below[0].block_hash, ())
        num_below = sizes[block.id] - len(run)
        used = sum(one.ref_count > 0 for one in run)
        nodes.append(PrefixNode(len(nodes), parent, len(run), used, num_below))
        told += len(run)
        coming.extend((child, len(nodes) - 1) for child in _by_size(below, sizes))
    return nodes, len(cached) - told


def _by_size(blocks: Sequence[Block], sizes: dict[int, int]) -> list[Block]:
    return sorted(blocks, key=lambda block: -sizes[block.id])


def _sizes(blocks: Sequence[Block], children: dict[bytes | None, list[Block]]) -> dict[int, int]:
    """Blocks in the subtree of each, by block id."""
    sizes = {block.id: 1 for block in blocks}
    order = list(children.get(None, ()))
    for block in order:  # grows: each block comes after its parent
        order.extend(children.get(block.block_hash, ()))
    by_hash = {block.block_hash: block for block in blocks}
    for block in reversed(order):
        parent = by_hash.get(block.parent_hash)
        if parent is not None:
            sizes[parent.id] += sizes[block.id]
    return sizes
