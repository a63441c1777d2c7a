"""Turns GGUF block formats into float32 tensors. Knows bytes and blocks, not names or architectures.

Each splitter takes blocks [n, bytes per block] uint8 and returns codes [n, values per block], float32 scales and,
where the type has them, minima, both [n, groups]. A value is code * scale + minimum, with the same order of float
operations as ggml, so that the result is the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.layers.scheme import Block, Role, ScaleGrid, Scheme, ZeroPoints
from quire.loader.gguf_file import TENSOR_TYPES
from quire.loader.gguf_iq import SPLITTERS, Parts
from quire.loader.gguf_iq import half as _half

FLOAT_TYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Values decoded at a time: 1 MiB of float32, so that the intermediate results stay in the CPU's cache.
_CHUNK_VALUES = 1 << 18

# values and bytes of a block
BLOCK_SIZES = {name: (values, num_bytes) for name, values, num_bytes in TENSOR_TYPES.values()}


def _nibbles(packed: Tensor) -> Tensor:
    """[n, k] bytes -> [n, 2k]: all low nibbles of a row, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _high_bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes -> [n, 32]: bit i of the little-endian word, moved to bit 4."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])
    return codes.view(torch.int8) - 16, _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])
    return codes.view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _two_bit_fields(packed: Tensor) -> Tensor:
    """[n, 32 h] bytes -> [n, h, 4, 32]: for each 32 bytes, the four two-bit fields from the lowest up."""
    halves = packed.reshape(packed.shape[0], -1, 1, 32)
    return (halves >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)) & 3


def _q2_k(blocks: Tensor) -> Parts:
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    steps = (scales & 15).float().mul_(_half(blocks, 80))
    minima = (scales >> 4).float().mul_(_half(blocks, 82))
    return _two_bit_fields(packed).flatten(1), steps, minima.neg_()


def _q3_k(blocks: Tensor) -> Parts:
    mask, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low = _nibbles(scales[:, :8])
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (scales[:, 8:].unsqueeze(1) >> shifts & 3).flatten(1)
    steps = (low | (high << 4)).float().sub_(32).mul_(_half(blocks, 108))
    bits = mask.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    values = _two_bit_fields(packed).flatten(1) | (bits << 2).flatten(1)
    return values.to(torch.int8) - 4, steps


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Steps and minima [n, 8] of Q4_K and Q5_K: two halves, then 12 bytes holding 16 six-bit numbers."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)
    return steps.float().mul_(_half(blocks, 0)), minima.float().mul_(_half(blocks, 2)).neg_()


def _nibble_groups(packed: Tensor) -> Tensor:
    """[n, 128] bytes -> [n, 8, 32]: for each 32 bytes, the low nibbles and then the high ones."""
    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat((groups & 15, groups >> 4), dim=2).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Parts:
    return _nibble_groups(blocks[:, 16:]).flatten(1), *_six_bit_scales(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    bits = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    codes = (_nibble_groups(blocks[:, 48:]) | (bits << 4)).flatten(1)
    return codes.view(torch.int8), *_six_bit_scales(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208]
    halves = low.reshape(-1, 2, 64)
    nibbles = torch.cat((halves & 15, halves >> 4), dim=2)  # [n, 2, 128]
    codes = nibbles.flatten(1) | (_two_bit_fields(high) << 4).flatten(1)
    return codes.view(torch.int8) - 32, scales.view(torch.int8).float().mul_(_half(blocks, 208))


_SCALED: tuple[tuple[Role, str], ...] = (("weight", "codes"), ("scales", "scales"))
_MIDDLE = ZeroPoints(8.0)


def _plain(element: str, group: int, dtype: torch.dtype, *, minima: bool = False) -> Scheme:
    roles: tuple[tuple[Role, str], ...] = (*_SCALED, ("minima", "minima")) if minima else _SCALED
    zeros = _MIDDLE if element == "UINT4" and not minima else None
    return Scheme(element, scales=ScaleGrid(1, group, dtype), zeros=zeros, roles=roles)


_SPLITTERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    **SPLITTERS,
}
# What a type's codes, scales and minima are when they lie apart; of others small integers and a scale for each 16.
_PLAIN = dict.fromkeys(_SPLITTERS, _plain("INT8", 16, torch.float32)) | {
    "Q8_0": _plain("INT8", 32, torch.float16),
    "Q4_0": _plain("UINT4", 32, torch.float16),
    "Q4_1": _plain("UINT4", 32, torch.float16, minima=True),
    "Q5_0": _plain("INT8", 32, torch.float16),
    "Q5_1": _plain("INT8", 32, torch.float16, minima=True),
    "Q2_K": _plain("UINT4", 16, torch.float32, minima=True),
    "Q4_K": _plain("UINT4", 32, torch.float32, minima=True),
    "Q5_K": _plain("INT8", 32, torch.float32, minima=True),
    "MXFP4": _plain("E2M1", 32, torch.float32),
    "NVFP4": _plain("E2M1", 16, torch.float32),
}
# The place of a doubled 4-bit float, 12 more than it, among TABLES["E2M1"].
_E2M1_PLACES = torch.tensor([15, 0, 0, 0, 14, 0, 13, 0, 12, 11, 10, 9, 0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7]).byte()


def _decode(type_name: str, blocks: Tensor) -> Tensor:
    """Blocks [n, bytes] -> float32 [n, values], rounded where ggml rounds."""
    codes, scales, *minima = _SPLITTERS[type_name](blocks)
    zeros = _PLAIN[type_name].zeros
    values = codes.float() if zeros is None else codes.float().sub_(8)
    values = values.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    return (values.add_(minima[0].unsqueeze(-1)) if minima else values).flatten(1)


SUPPORTED_TYPES: tuple[str, ...] = (*FLOAT_TYPES, *_SPLITTERS)


def decoded_dtype(type_name: str) -> torch.dtype:
    """What `dequantize` returns for a supported type."""
    return FLOAT_TYPES.get(type_name, torch.float32)


def dequantize(data: NDArray[np.uint8], type_name: str, shape: tuple[int, ...], chunk: int = _CHUNK_VALUES) -> Tensor:
    """Decode stored bytes into a new tensor; float types keep their dtype, block types become float32.

    `chunk`: values that are decoded together.
    """
    stored = torch.empty(data.shape, dtype=torch.uint8)
    stored.numpy()[...] = data  # one copy: the mapping is read-only, which torch cannot express
    if type_name in FLOAT_TYPES:
        return stored.view(FLOAT_TYPES[type_name]).view(shape)
    values_per_block, bytes_per_block = BLOCK_SIZES[type_name]
    blocks = stored.view(-1, bytes_per_block)
    result = torch.empty(math.prod(shape) // values_per_block, values_per_block)
    step = chunk // values_per_block
    for start in range(0, len(blocks), step):
        result[start : start + step] = _decode(type_name, blocks[start : start + step])
    return result.view(shape)


def _decode_rows(type_name: str, blocks: Tensor) -> Tensor:
    """Blocks [rows, bytes of a row] -> float32 [rows, values]."""
    values, num_bytes = BLOCK_SIZES[type_name]
    shape = (blocks.shape[0], blocks.shape[1] // num_bytes * values)
    return dequantize(blocks.numpy().reshape(-1), type_name, shape)


def _split_rows(type_name: str, blocks: Tensor) -> dict[Role, Tensor]:
    """Blocks [rows, bytes of a row] -> the tensors of the plain scheme, each [rows, ...]."""
    codes, scales, *minima = _SPLITTERS[type_name](blocks.reshape(-1, BLOCK_SIZES[type_name][1]))
    plain = _PLAIN[type_name]
    assert plain.scales is not None
    assert plain.scales.columns is not None
    if plain.element == "E2M1":  # doubled so far, and scales of 16
        codes = _E2M1_PLACES[codes.long() + 12]
        scales = scales[:, :: plain.scales.columns // 16] * 2
    grids = [grid.reshape(len(blocks), -1) for grid in (scales, *minima)]
    tensors: dict[Role, Tensor] = {
        "weight": codes.reshape(len(blocks), -1),
        "scales": grids[0].to(plain.scales.dtype),
    }
    return {**tensors, "minima": grids[1]} if minima else tensors


def _block(name: str) -> Block:
    return Block(*BLOCK_SIZES[name], partial(_decode_rows, name), _PLAIN[name], partial(_split_rows, name))


SCHEMES = {name: Scheme(name, _block(name)) for name in _SPLITTERS}
