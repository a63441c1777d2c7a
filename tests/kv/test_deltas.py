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


def test_drop_tail_takes_only_the_rows_own_newest_entries() -> None:
    deltas = BlockDeltas()
    for row in (1, 2, 1, 1):
        deltas.set_entries(row, 0, 0, [Block(row)])
    deltas.drop_tail(1)
    assert deltas.rows == [1, 2]
    assert len(deltas.groups) == len(deltas.indices) == len(deltas.ids) == 2
    deltas.drop_tail(1)
    assert deltas.rows == [1, 2]
