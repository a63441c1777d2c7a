"""Changes of block tables, packed in the four parallel columns that a StepPlan carries."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv.block_pool import Block


class BlockDeltas:
    __slots__ = ("groups", "ids", "indices", "rows")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.groups: list[int] = []
        self.indices: list[int] = []
        self.ids: list[int] = []

    def set_entries(self, row: int, group: int, start: int, blocks: Sequence[Block]) -> None:
        """Table entries from `start` on become these blocks."""
        count = len(blocks)
        if count == 1:
            self.rows.append(row)
            self.groups.append(group)
            self.indices.append(start)
            self.ids.append(blocks[0].id)
            return
        self.rows += [row] * count
        self.groups += [group] * count
        self.indices += range(start, start + count)
        self.ids += [block.id for block in blocks]
