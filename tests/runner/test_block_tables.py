"""Block tables: packed deltas land in their cells, and a token's slot is where its block says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.runner.request_rows import BlockTables
from quire.types.step import StepPlan

CPU = torch.device("cpu")
GROUPS, ROWS, LENGTH, BLOCK = 2, 3, 50, 8


def plan_of(cells: dict[tuple[int, int, int], int]) -> StepPlan:
    columns = [list(column) for column in zip(*cells, strict=True)] or [[], [], []]
    return StepPlan(
        0,
        [],
        [],
        block_groups=columns[0],
        block_rows=columns[1],
        block_indices=columns[2],
        block_ids=list(cells.values()),
    )


CELLS = st.dictionaries(
    st.tuples(st.integers(0, GROUPS - 1), st.integers(0, ROWS - 1), st.integers(0, LENGTH // BLOCK)),
    st.integers(0, 1000),
)


@given(st.lists(CELLS, max_size=5))
def test_deltas_add_up(plans: list[dict[tuple[int, int, int], int]]) -> None:
    tables, expected = BlockTables(GROUPS, ROWS, LENGTH, BLOCK, CPU), {}
    for cells in plans:
        tables.apply(plan_of(cells))
        expected |= cells
    for (group, row, index), block in expected.items():
        assert tables.tables[group, row, index] == block
    assert tables.tables.count_nonzero() == sum(block != 0 for block in expected.values())


def test_the_row_of_nobody_has_only_the_null_block() -> None:
    tables = BlockTables(GROUPS, ROWS, LENGTH, BLOCK, CPU)
    tables.apply(plan_of({(1, row, index): 10 * row + index + 1 for row in range(ROWS) for index in range(4)}))
    assert tables.tables.shape[1] == ROWS + 1
    assert not tables.tables[:, ROWS].any()


def test_there_is_room_for_steps_in_flight() -> None:
    tables = BlockTables(1, 1, 16, 8, CPU)
    tables.apply(plan_of({(0, 0, 2): 9}))
    assert tables.tables[0, 0].tolist() == [0, 0, 9]
