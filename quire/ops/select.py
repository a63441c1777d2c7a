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
