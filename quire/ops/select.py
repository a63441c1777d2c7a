"""Some rows of many, for a layer that goes on with these alone."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [n, ...] at indices [m] int64: [m, ...]."""
    return x.index_select(0, indices)


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, shape = 1 + seed % 9, ((1,), (7,), (3, 16), (2, 65))[seed % 4]
    x = torch.randn(rows, *shape, generator=generator)
    return x, torch.randint(rows, (1 + seed % 5,), generator=generator)


GATHER_ROWS = Op(
    "gather_rows",
    gather_rows,
    generate_inputs,
    0.0,
    (Implementation("triton", "triton.gather:gather_rows", ("cuda",)), native("gather_rows")),
)


def take_columns(x: Tensor, first: int, width: int) -> Tensor:
    """x [n, ...] at columns [first, first + width), contiguous."""
    return x[:, first : first + width].contiguous()


def generate_columns(seed: int) -> tuple[Tensor, int, int]:
    x = torch.randn(1 + seed % 7, 8 + seed, generator=torch.Generator().manual_seed(seed))
    return x, seed % 8, 1 + seed // 2


TAKE_COLUMNS = Op("take_columns", take_columns, generate_columns, 0.0, (native("take_columns"),))
