"""Block tables of all rows and KV groups, on the device, kept current by the plans' packed deltas."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.ops.base import Target
from quire.ops.rows import WRITE_BLOCKS
from quire.platform.transfer import Lent
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.step import StepPlan


class BlockTables:
    def __init__(
        self, num_groups: int, max_rows: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        # One spare block: a step in flight may run past the end of a request that has just finished.
        max_blocks = -(-max_model_len // block_size) + 1
        # And one spare row, see RequestRows.
        self.tables = torch.zeros(num_groups, max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self._write = WRITE_BLOCKS.bind(Target(device.type))
        self._lent = Lent(device)

    @staticmethod
    def contributes(sizes: EngineSizes) -> Iterable[LedgerLine]:
        blocks = sizes.max_model_len // sizes.block_size
        yield LedgerLine("block tables", sizes.max_num_seqs * blocks * 4, f"{blocks} blocks a request")

    def apply(self, plan: StepPlan) -> None:
        if not plan.block_ids:
            return
        columns = (plan.block_groups, plan.block_rows, plan.block_indices, plan.block_ids)
        with self._lent.list([x for column in columns for x in column]) as packed:
            self._write(self.tables, packed.view(4, -1))
