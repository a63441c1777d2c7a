"""Some rows of many, for a layer that goes on with these alone."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [n, ...] at indices [m] int64: [m, ...]."""
    return x.index_select(0, indices)


GATHER_ROWS = Op("gather_rows", gather_rows, 0.0, (triton("gather_rows", "gather"), native("gather_rows")))


def take_columns(x: Tensor, first: int, width: int) -> Tensor:
    """x [n, ...] at columns [first, first + width), contiguous."""
    return x[:, first : first + width].contiguous()


TAKE_COLUMNS = Op("take_columns", take_columns, 0.0, (native("take_columns"),))


def join_columns(first: Tensor, second: Tensor) -> Tensor:
    """Two matrices [n, a] and [n, b] side by side: [n, a + b]."""
    return torch.cat((first, second), dim=-1)


JOIN_COLUMNS = Op("join_columns", join_columns, 0.0, (native("join_columns"),))
