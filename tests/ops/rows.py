"""The promise of every op: a row's bits do not depend on the other rows, nor on where in the batch it stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BATCHES = (4, 5, 7, 8, 13, 32, 61, 257)


def assert_rows_independent(op: Callable[[Tensor], Tensor], make_rows: Callable[[int], Tensor]) -> None:
    """`make_rows(n)` gives n random rows; row 0 of the first batch is put into batches of every size."""
    row = make_rows(4)[:1]
    reference = op(row.expand(4, *row.shape[1:]).contiguous())[0]
    for size in BATCHES:
        for position in {0, 1, size // 2, size - 1}:
            batch = make_rows(size)
            batch[position] = row[0]
            assert torch.equal(op(batch)[position], reference), f"row {position} of {size} differs"
