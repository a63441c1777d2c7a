"""Matrices of 4 bits as the kernels for GPUs keep them. Imports no Triton: layers fill them on any machine.

A byte holds two columns of a line that are 32 apart: columns 64 c + j in the low bits, 64 c + 32 + j in the high
ones (j < 32). Every group of columns has a scale, and integers may have a zero point; E2M1 may have scales that are
powers of two, stored as exponents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # columns whose halves share bytes
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedWeight(NamedTuple):
    """[experts, N, K] in 4 bits. `zeros` None: of integers, 8 stands for 0."""

    codes: Tensor  # [experts, N, K / 2] uint8
    scales: Tensor  # [experts, N, K / group] of a float type; uint8: exponents
    zeros: Tensor | None = None  # [experts, N, K / group] uint8
    is_float: bool = False  # codes are E2M1

    @property
    def sizes(self) -> tuple[int, int, int]:
        experts, n, half = self.codes.shape
        return experts, n, 2 * half

    @property
    def group(self) -> int:
        return self.sizes[2] // self.scales.shape[2]

    def unpacked(self) -> Tensor:
        """The values as float32 [experts, N, K]."""
        halves = torch.stack((self.codes & 15, self.codes >> 4), -1).unflatten(-2, (-1, CHUNK // 2))
        codes = halves.transpose(-1, -2).flatten(-3)
        if self.is_float:
            table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)
            values = table[codes.long()]
        elif self.zeros is None:
            values = codes.float() - 8.0
        else:
            values = codes.float() - self.zeros.float().repeat_interleave(self.group, -1)
        scales = self.scales.float()
        if self.scales.dtype == torch.uint8:
            scales = torch.ldexp(torch.ones_like(scales), self.scales.int() - 127)
        return values * scales.repeat_interleave(self.group, -1)


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [..., K] of 4 bits -> [..., K / 2] uint8; K is whole chunks."""
    halves: Tensor = codes.to(torch.uint8).unflatten(-1, (-1, 2, CHUNK // 2))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
