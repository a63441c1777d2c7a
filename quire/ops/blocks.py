"""New blocks of requests, written where attention finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op


def write_blocks(tables: Tensor, packed: Tensor) -> Tensor:
    """tables[group, row, column] = block for each column of packed [4, n] int32. Mutates and returns `tables`.

    `packed` may lie on the host where the device can read it.
    """
    groups, rows, columns, blocks = packed.to(torch.int64).unbind(0)
    tables[groups, rows, columns] = blocks.to(tables.dtype)
    return tables


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    groups, rows, columns = 1 + seed % 3, 30, 11
    cells = torch.randperm(groups * rows * columns, generator=generator)[: 1 + 70 * seed]
    blocks = torch.randint(1, 1 << 30, cells.shape, generator=generator)
    packed = torch.stack((cells // (rows * columns), cells // columns % rows, cells % columns, blocks))
    return torch.zeros(groups, rows, columns, dtype=torch.int32), packed.to(torch.int32)


WRITE_BLOCKS = Op(
    "write_blocks",
    write_blocks,
    generate_inputs,
    0.0,
    (Implementation("triton", "triton.step:write_blocks", ("cuda",)),),
)
