from __future__ import annotations

from quire.kv.block_pool import Block
from quire.kv.deltas import BlockDeltas


def test_columns_stay_parallel() -> None:
    deltas = BlockDeltas()
    deltas.set_entries(3, 0, 5, [Block(7)])
    deltas.set_entries(4, 1, 0, [Block(8), Block(9)])
    deltas.set_entries(4, 1, 2, [])
    assert list(zip(deltas.rows, deltas.groups, deltas.indices, deltas.ids, strict=True)) == [
        (3, 0, 5, 7),
        (4, 1, 0, 8),
        (4, 1, 1, 9),
    ]
