"""GGUF types whose values are small integers times a scale: IQ, TQ, MXFP4 and NVFP4.

Each splitter takes blocks [n, bytes per block] uint8 and returns codes [n, values per block] int8 and a float32 scale
for each 16 of them: a value is their product, to the last bit what ggml computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.loader.gguf_grids import grid

Parts = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]  # codes, scales, minima
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_EIGHT = torch.arange(8)
# Seven sign bits in a byte, and an eighth that makes their number even.
_EVEN_SIGNS = torch.tensor([code | code.bit_count() % 2 << 7 for code in range(128)])


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at one byte offset of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, bytes] -> unsigned numbers of a type's width, as int64."""
    aligned = data.clone(memory_format=torch.contiguous_format)
    return aligned.view(dtype).long() & (1 << 8 * dtype.itemsize) - 1


def _spread(scales: Tensor, values: int) -> Tensor:
    """scales [n, s] of equal parts of a block -> one for each 16 values."""
    return scales.repeat_interleave(values // 16 // scales.shape[1], 1)


def _signed(points: Tensor, signs: Tensor) -> Tensor:
    """Points [n, k, 4 or 8] and a byte of signs for each 8 coordinates -> codes [n, values]."""
    codes = points.flatten(1).unflatten(1, (-1, 8))
    negative = (signs.unsqueeze(-1) >> _EIGHT & 1).bool()
    return torch.where(negative, -codes, codes).flatten(1)


def _fields(data: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[n, k] -> [n, k * shifts]: the fields of each number, one after the other."""
    return (data.long().unsqueeze(-1) >> torch.tensor(shifts) & mask).flatten(1)


def _iq2_steps(blocks: Tensor, scales: Tensor) -> Tensor:
    return half(blocks, 0) * (0.5 + scales.float()) * 0.25


def _iq2_xxs(blocks: Tensor) -> Parts:
    words = _words(blocks[:, 2:], torch.int32).unflatten(1, (-1, 2))
    indices, rest = _fields(words[..., 0], (0, 8, 16, 24), 255), words[..., 1]
    codes = _signed(grid("IQ2_XXS")[indices], _EVEN_SIGNS[_fields(rest, (0, 7, 14, 21), 127)])
    return codes, _spread(_iq2_steps(blocks, rest >> 28), 256)


def _iq2_xs(blocks: Tensor) -> Parts:
    words = _words(blocks[:, 2:66], torch.int16)
    codes = _signed(grid("IQ2_XS")[words & 511], _EVEN_SIGNS[words >> 9])
    return codes, _iq2_steps(blocks, _fields(blocks[:, 66:], (0, 4), 15))


def _iq2_s(blocks: Tensor) -> Parts:
    indices = blocks[:, 2:34].long() | _fields(blocks[:, 66:74], (0, 2, 4, 6), 3) << 8
    codes = _signed(grid("IQ2_S")[indices], blocks[:, 34:66].long())
    return codes, _iq2_steps(blocks, _fields(blocks[:, 74:], (0, 4), 15))


def _iq3_xxs(blocks: Tensor) -> Parts:
    rest = _words(blocks[:, 66:], torch.int32)
    codes = _signed(grid("IQ3_XXS")[blocks[:, 2:66].long()], _EVEN_SIGNS[_fields(rest, (0, 7, 14, 21), 127)])
    return codes, _spread(half(blocks, 0) * (0.5 + (rest >> 28).float()) * 0.5, 256)


def _iq3_s(blocks: Tensor) -> Parts:
    indices = blocks[:, 2:66].long() | _fields(blocks[:, 66:74], tuple(range(8)), 1) << 8
    codes = _signed(grid("IQ3_S")[indices], blocks[:, 74:106].long())
    scales = _fields(blocks[:, 106:], (0, 4), 15)
    return codes, _spread(half(blocks, 0) * (1 + 2 * scales).float(), 256)


def _shifted(indices: Tensor, down: Tensor) -> Tensor:
    """Points of IQ1 [n, k, 8] plus or minus an eighth, times eight; `down` [n, k]."""
    return (grid("IQ1_S")[indices] * 8 + torch.where(down, -1, 1).unsqueeze(-1)).to(torch.int8).flatten(1)


def _iq1_s(blocks: Tensor) -> Parts:
    high = _words(blocks[:, 34:], torch.int16)
    indices = blocks[:, 2:34].long() | _fields(high, (0, 3, 6, 9), 7) << 8
    codes = _shifted(indices, (high >> 15 == 1).repeat_interleave(4, 1))
    return codes, _spread(half(blocks, 0) * (2 * (high >> 12 & 7) + 1).float() / 8, 256)


def _iq1_m(blocks: Tensor) -> Parts:
    scales = _words(blocks[:, 48:], torch.int16)
    step = (scales >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True).to(torch.int16).view(torch.float16)
    high = _fields(blocks[:, 32:48], (0, 4), 15)
    codes = _shifted(blocks[:, :32].long() | (high & 7) << 8, high >> 3 == 1)
    return codes, step.float() * (2 * _fields(scales, (0, 3, 6, 9), 7) + 1).float() / 8


def _table(values: tuple[int, ...], packed: Tensor, width: int) -> Tensor:
    """[n, bytes] -> codes: for each `width` bytes those of the low nibbles, then those of the high ones."""
    groups = packed.reshape(packed.shape[0], -1, 1, width)
    return torch.tensor(values, dtype=torch.int8)[torch.cat((groups & 15, groups >> 4), 2).long()].flatten(1)


def _iq4_nl(blocks: Tensor) -> Parts:
    return _table(_IQ4, blocks[:, 2:], 16), _spread(half(blocks, 0), 32)


def _iq4_xs(blocks: Tensor) -> Parts:
    high = _fields(_words(blocks[:, 2:4], torch.int16), tuple(range(0, 16, 2)), 3)
    scales = (_fields(blocks[:, 4:8], (0, 4), 15) | high << 4) - 32
    return _table(_IQ4, blocks[:, 8:], 16), _spread(half(blocks, 0) * scales.float(), 256)


def _tq1_0(blocks: Tensor) -> Parts:
    """Five digits of base 3 in a byte, the first being its high part; four in the last four bytes."""
    parts = []
    for start, stop, width, count in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        data = blocks[:, start:stop].int().view(-1, 1, width) * (3 ** torch.arange(count)).view(-1, 1) & 255
        parts.append((data * 3 >> 8).flatten(1))
    return (torch.cat(parts, 1) - 1).to(torch.int8), _spread(half(blocks, 52), 256)


def _tq2_0(blocks: Tensor) -> Parts:
    fields = blocks[:, :64].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3
    return fields.flatten(1).to(torch.int8) - 1, _spread(half(blocks, 64), 256)


def _mxfp4(blocks: Tensor) -> Parts:
    """A power of two for 32 values; half of it, because the table is of doubled values."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp_max(1), exponents - 1 << 23)
    return _table(_E2M1_DOUBLED, blocks[:, 1:], 16), _spread(bits.view(torch.float32), 32)


def _nvfp4(blocks: Tensor) -> Parts:
    """A scale of four exponent and three mantissa bits for 16 values; its sign bit is not looked at."""
    codes = blocks[:, :4].int()
    exponents, mantissas = codes >> 3 & 15, (codes & 7).float()
    scales = torch.where(exponents == 0, mantissas / 8, 1 + mantissas / 8) * 2.0 ** (exponents.clamp_min(1) - 8)
    return _table(_E2M1_DOUBLED, blocks[:, 4:], 8), torch.where(codes == 127, 0.0, scales)


SPLITTERS: dict[str, Callable[[Tensor], Parts]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
