"""Lists that kernels read in host memory."""

from __future__ import annotations

import torch

from quire.runner.request_rows import BlockTables
from quire.types.step import StepPlan
from tests.gpu.helpers import needs_gpu

pytestmark = needs_gpu


def test_a_list_stays_until_it_is_read() -> None:
    """The device is far behind, and there are more lists than places for them: those that are read late are whole."""
    device = torch.device("cuda")
    tables = BlockTables(1, 40, 16 * 400, 16, device)
    torch.cuda.synchronize()
    for row in range(40):
        torch.cuda._sleep(2_000_000)  # about a millisecond
        count = 1 + 10 * row
        plan = StepPlan(
            row,
            [],
            [],
            block_rows=[row] * count,
            block_groups=[0] * count,
            block_indices=list(range(count)),
            block_ids=[1000 * row + 1 + index for index in range(count)],
        )
        tables.apply(plan)
    found = tables.tables[0].cpu()
    for row in range(40):
        count = 1 + 10 * row
        assert found[row, :count].tolist() == [1000 * row + 1 + index for index in range(count)]
        assert not found[row, count:].any()
