"""Quantized matrices as the kernels for GPUs keep them. Imports no Triton: layers fill them on any machine.

Codes of 4 bits: a word of 16 bits holds four columns of a line that are 16 apart, from its lowest bits on columns
64 c + j, 64 c + 16 + j, 64 c + 32 + j and 64 c + 48 + j (j < 16). Two words in a register give, by one shift and one
mask, two columns side by side. Codes of 8 bits are bytes. Every group of columns has a scale, and integers may have a
zero point; 4-bit floats may have scales that are powers of two, stored as exponents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # columns that share words
MANY_SLOTS = 128  # of an expert on average, for which all experts are unpacked before the matmul
PIECE = 128  # columns that kernels multiply at a time
MANY_LINES = 4096  # of a weight: up to these, programs have half as many lines, and fewer share the inner sum
SPLIT_PROGRAMS = 256  # that a matmul of few rows is split into
_MOST_SPLITS = 8
FIXED_ROWS = 1024  # at a time, where no bit may depend on the number of rows
_SLICES = 4
E4M3 = torch.float8_e4m3fn
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedWeight(NamedTuple):
    """[experts, N, K]: (code - zero point) * scale + minimum, times the number of its line.

    `zeros` None: of integers of 4 bits, 8 stands for 0, or with minima 0; bytes have a sign.
    """

    codes: Tensor  # [experts, N, K / 2] uint8: two of 4 bits; [experts, N, K] int8 or E4M3: bytes
    scales: Tensor  # [experts, N, K / group] of a float type, or E4M3; uint8: exponents
    zeros: Tensor | None = None  # [experts, N, K / group] uint8
    is_float: bool = False  # codes of 4 bits are E2M1
    minima: Tensor | None = None  # [experts, N, K / group] float32
    line_scale: Tensor | None = None  # [experts, N] float32
    rows_per_scale: int = 1  # consecutive rows of the matrix that share their scales, as in 128x128 blocks

    @property
    def has_bytes(self) -> bool:
        return self.codes.dtype != torch.uint8

    @property
    def sizes(self) -> tuple[int, int, int]:
        experts, n, width = self.codes.shape
        return experts, n, width if self.has_bytes else 2 * width

    @property
    def group(self) -> int:
        return self.sizes[2] // self.scales.shape[2]

    @property
    def is_fine(self) -> bool:
        """Whether a piece that kernels multiply at a time has several scales, or minima."""
        return self.minima is not None or self.group < (CHUNK if self.has_bytes else CHUNK // 2)

    def unpacked(self) -> Tensor:
        """The values as float32 [experts, N, K]."""
        values = self._codes()
        if self.zeros is not None:
            values = values - self.zeros.float().repeat_interleave(self.group, -1)
        elif not self.has_bytes and not self.is_float and self.minima is None:
            values = values - 8.0
        scales = self.scales.float()
        if self.scales.dtype == torch.uint8:
            scales = torch.ldexp(torch.ones_like(scales), self.scales.int() - 127)
        values = values * scales.repeat_interleave(self.group, -1)
        if self.minima is not None:
            values = values + self.minima.repeat_interleave(self.group, -1)
        return values if self.line_scale is None else values * self.line_scale.unsqueeze(-1)

    def _codes(self) -> Tensor:
        """What codes stand for, float32 [experts, N, K]."""
        if self.has_bytes:
            return self.codes.float()
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
        words: Tensor = codes.unflatten(-1, (-1, CHUNK // _SLICES, _SLICES))
        codes = words.transpose(-1, -2).flatten(-3)
        if not self.is_float:
            return codes.float()
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)
        return table[codes.long()]


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [..., K] of 4 bits -> [..., K / 2] uint8; K is whole chunks."""
    words: Tensor = codes.to(torch.uint8).unflatten(-1, (-1, _SLICES, CHUNK // _SLICES)).transpose(-1, -2)
    return (words[..., 0::2] | words[..., 1::2] << 4).flatten(-3)


def lines_of(n: int) -> int:
    """Lines of a weight [n, k] that a program has."""
    return 64 if n <= MANY_LINES else 128


def splits_of(n: int, k: int, programs: int = SPLIT_PROGRAMS) -> int:
    """Of the inner sum of a weight [n, k], so that there are about that number of programs."""
    wanted = max(1, programs // -(-n // lines_of(n)))
    return int(1 << min(wanted, _MOST_SPLITS, max(1, k // PIECE)).bit_length() - 1)


def fixed_split_bytes(n: int, k: int) -> int:
    """Partial sums of a matmul with a weight [n, k] in the order that no number of rows changes."""
    splits = splits_of(n, k)
    return splits * FIXED_ROWS * n * 4 if splits > 1 else 0
