"""Inputs of the ops in quire/ops/rope.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.rope import gather_rotation


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, head_dim = 4 + seed % 13, 8 * (1 + seed % 4)
    angles = torch.rand(64, head_dim // 2, generator=generator) * 6.3
    positions = torch.randint(0, 64, (rows,), generator=generator)
    cos, sin = gather_rotation(torch.cat((angles.cos(), angles.sin()), -1), positions, torch.float32)
    return torch.randn(rows, 6, head_dim, generator=generator), cos, sin


def generate_positions(seed: int) -> tuple[Tensor, Tensor, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(32, 2 * (1 + seed % 33), generator=generator)
    return table, torch.randint(0, 32, (1 + seed % 7,), generator=generator), torch.float32


def generate_axes(seed: int) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    half = 1 + seed % 33
    table, axes = torch.randn(32, 2 * half, generator=generator), torch.randint(0, 3, (half,), generator=generator)
    return table, torch.randint(0, 32, (3, 1 + seed % 7), generator=generator), axes, torch.float32


INPUTS = {"gather_rotation": generate_positions, "gather_rotation_by_axis": generate_axes}
