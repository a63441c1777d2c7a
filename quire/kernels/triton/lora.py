"""LoRA: two kernels that add what each token's adapter adds to the result of a linear layer.

Tokens are taken in tiles. A tile multiplies by the matrices of every adapter that one of its tokens has, and each
token keeps that of its own: its sums have one order, whatever its neighbours have. Tiles without any are skipped.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_TOKENS = 16  # of a tile
_PIECE = 128  # of the inner dimension
_SPLIT = 512  # inner elements that are one partial sum
_COLUMNS = 128


@triton.jit
def _shrink(
    x_ptr, down_ptr, slots_ptr, ranks_ptr, partial_ptr,
    num_tokens, num_slots, inner, x_stride, lines,
    RANK: tl.constexpr, TOKENS: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """partial [splits, num_tokens, lines]: the sums over one split of the inner dimension, of one piece's lines."""
    begin_dependent(PDL)
    tile, piece, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANK)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    found = tl.zeros([TOKENS, RANK], tl.float32)
    for slot in range(num_slots):
        mine = slots == slot
        if tl.max(mine.to(tl.int32)) > 0:
            rank = tl.load(ranks_ptr + slot)
            first = tl.cast(slot, tl.int64) * lines + piece * RANK
            base = down_ptr + first * inner
            sums = tl.zeros([TOKENS, RANK], tl.float32)
            for start in range(0, SPLIT, PIECE):
                at = split * SPLIT + start + tl.arange(0, PIECE)
                x = tl.load(
                    x_ptr + tokens[:, None].to(tl.int64) * x_stride + at[None, :],
                    mask=mine[:, None] & (at < inner)[None, :],
                    other=0.0,
                )
                weight = tl.load(
                    base + ranks[None, :] * inner + at[:, None],
                    mask=(at < inner)[:, None] & (ranks < rank)[None, :],
                    other=0.0,
                )
                sums = tl.dot(x, weight.to(x.dtype), sums, input_precision="ieee")
            found = tl.where(mine[:, None], sums, found)
    place = (
        partial_ptr
        + (tl.cast(split, tl.int64) * num_tokens + tokens[:, None]) * lines
        + piece * RANK
        + ranks[None, :]
    )
    tl.store(place, found, mask=(slots >= 0)[:, None])


@triton.jit
def _expand(
    partial_ptr, up_ptr, slots_ptr, ranks_ptr, starts_ptr, out_ptr,
    num_tokens, num_slots, splits, outputs, lines, out_stride,
    RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out += the sum of the splits times up, for some columns of one piece."""
    begin_dependent(PDL)
    tile, piece = tl.program_id(0), tl.program_id(2)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANK)
    end = tl.load(starts_ptr + piece + 1)
    columns = tl.load(starts_ptr + piece) + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < end
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    if tl.max(slots) >= 0 and tl.max(inside.to(tl.int32)) > 0:
        shrunk = tl.zeros([TOKENS, RANK], tl.float32)
        for split in range(splits):
            place = (tl.cast(split, tl.int64) * num_tokens + tokens[:, None]) * lines + piece * RANK + ranks[None, :]
            shrunk += tl.load(partial_ptr + place, mask=(slots >= 0)[:, None], other=0.0)
        found = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for slot in range(num_slots):
            mine = slots == slot
            if tl.max(mine.to(tl.int32)) > 0:
                rank = tl.load(ranks_ptr + slot)
                up = tl.load(
                    up_ptr + (tl.cast(slot, tl.int64) * RANK + ranks[:, None]) * outputs + columns[None, :],
                    mask=inside[None, :] & (ranks < rank)[:, None],
                    other=0.0,
                )
                added = tl.dot(shrunk.to(up.dtype), up, input_precision="ieee")
                found = tl.where(mine[:, None], added, found)
        place = out_ptr + tokens[:, None].to(tl.int64) * out_stride + columns[None, :]
        mask = (slots >= 0)[:, None] & inside[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + found).to(out_ptr.dtype.element_ty), mask=mask)


def add_lora(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, ranks: Tensor, widths: tuple[int, ...]
) -> Tensor:
    """See quire/ops/lora.py. The rank that there is room for is a power of two of at least 16."""
    num_slots, pieces, room, inner = down.shape
    if room < 16 or room & (room - 1):
        more = max(16, triton.next_power_of_2(room)) - room  # only in tests: adapters are kept as kernels want them
        down, up = torch.nn.functional.pad(down, (0, 0, 0, more)), torch.nn.functional.pad(up, (0, 0, 0, more))
        room += more
    count, lines = len(x), pieces * room
    splits, tiles = triton.cdiv(inner, _SPLIT), triton.cdiv(count, _TOKENS)
    partial = torch.empty(splits, count, lines, dtype=torch.float32, device=x.device)
    _shrink[(tiles, pieces, splits)](
        x, down, slots, ranks, partial, count, num_slots, inner, x.stride(0), lines,
        RANK=room, TOKENS=_TOKENS, PIECE=_PIECE, SPLIT=_SPLIT, **launch_options(),
    )  # fmt: skip
    _expand[(tiles, triton.cdiv(max(widths), _COLUMNS), pieces)](
        partial, up, slots, ranks, _starts(widths, x.device), out,
        count, num_slots, splits, out.shape[1], lines, out.stride(0),
        RANK=room, TOKENS=_TOKENS, COLUMNS=_COLUMNS, **launch_options(),
    )  # fmt: skip
    return out


@cache
def _starts(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[pieces + 1] int32: where pieces begin."""
    return torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32, device=device)
