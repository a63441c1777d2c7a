"""Inputs of the ops in quire/ops/select.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, shape = 1 + seed % 9, ((1,), (7,), (3, 16), (2, 65))[seed % 4]
    x = torch.randn(rows, *shape, generator=generator)
    return x, torch.randint(rows, (1 + seed % 5,), generator=generator)


def generate_columns(seed: int) -> tuple[Tensor, int, int]:
    x = torch.randn(1 + seed % 7, 8 + seed, generator=torch.Generator().manual_seed(seed))
    return x, seed % 8, 1 + seed // 2


def generate_pairs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(1 + seed % 7, 1 + width, generator=generator) for width in (seed, 3 * seed % 11))
    return first, second


INPUTS = {"gather_rows": generate_inputs, "take_columns": generate_columns, "join_columns": generate_pairs}
