"""Inputs of the ops in quire/ops/encoder.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.encoder import TYPE_SHIFT, mark_second


def generate_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (1 + seed % 4,), generator=generator)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    index = torch.cat([torch.arange(int(count)) for count in counts] + [torch.zeros(seed % 3, dtype=torch.int64)])
    second = torch.randint(0, 7, (9,), generator=generator)
    return index, torch.randperm(9, generator=generator)[: len(counts)], starts, second


def generate_marked(seed: int) -> tuple[Tensor]:
    return (mark_second(*generate_rows(seed)),)


def generate_places(seed: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    width, first = 1 + 7 * seed, seed % 3
    x, positions, types = (torch.randn(count, width, generator=generator) for count in (5, 9 + first, 2))
    places = torch.randint(9, (5,), generator=generator)
    if seed % 4 == 0:
        return x, positions, None, places, first
    marked = places + (torch.randint(2, (5,), generator=generator) << TYPE_SHIFT)
    return x, None if seed % 4 == 1 else positions, types, marked, first


INPUTS = {"mark_second": generate_rows, "add_places": generate_places, "positions_of": generate_marked}
