"""Inputs of the ops in quire/ops/step.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_blocks(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    groups, rows, columns = 1 + seed % 3, 30, 11
    cells = torch.randperm(groups * rows * columns, generator=generator)[: 1 + 70 * seed]
    blocks = torch.randint(1, 1 << 30, cells.shape, generator=generator)
    packed = torch.stack((cells // (rows * columns), cells // columns % rows, cells % columns, blocks))
    return torch.zeros(groups, rows, columns, dtype=torch.int32), packed.to(torch.int32)


def generate_starts(seed: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
    generator = torch.Generator().manual_seed(seed)
    rows, longest = 9, 1 + 300 * seed
    packed: list[int] = []
    tokens: list[int] = []
    chosen = torch.randperm(rows, generator=generator)[: 1 + seed % 5].tolist()
    for row in chosen:
        length, *numbers = torch.randint(1, longest + 1, (3,), generator=generator).tolist()
        words = torch.randint(-(1 << 31), 1 << 31, (2,), generator=generator).tolist()
        packed += (row, length, len(tokens), *numbers, *words)
        tokens += torch.randint(1 << 17, (length,), generator=generator).tolist()
    room = torch.zeros(rows, longest + 8, dtype=torch.int32)
    return room, torch.zeros(4, rows, dtype=torch.int64), torch.tensor(packed + tokens).int(), len(chosen), longest


INPUTS = {"write_blocks": generate_blocks, "start_rows": generate_starts}
