"""Slots sorted by expert: which tokens each expert multiplies, in tiles that no other expert shares.

A slot is one of the k experts of a token; slot j of token i is number i * k + j. The sort is stable and uses no
atomics, so that the tiles are the same whenever the slots are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_AT_ONCE = 4096  # slots that a program looks at


class SortedSlots(NamedTuple):
    """Tile t are the slots order[begin[t]:end[t]], all of expert[t]; an expert of -1 is padding."""

    order: Tensor  # [n * k] int32
    tiles: Tensor  # [3, tiles] int32: expert, begin, end
    size: int  # slots of a tile, at most


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _sort_kernel(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    num_slots,
    num_tiles,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ONE: tl.constexpr,  # look is enough
    PDL: tl.constexpr,
):
    """A program finds the slots of one expert; those of experts before it are as many as have lower ids."""
    begin_dependent(PDL)
    expert = tl.program_id(0)
    slots = tl.arange(0, AT_ONCE)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    lower = tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32))
    if not ONE:
        for start in range(AT_ONCE, num_slots, AT_ONCE):
            ids = tl.load(ids_ptr + start + slots, mask=start + slots < num_slots, other=-1)
            lower += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32))
    count = 0
    for start in range(0, AT_ONCE if ONE else num_slots, AT_ONCE):
        if not ONE:
            ids = tl.load(ids_ptr + start + slots, mask=start + slots < num_slots, other=-1)
        mine = (ids == expert).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - 1
        tl.store(order_ptr + lower + count + rank, start + slots, mask=mine > 0)
        count += tl.sum(mine)
    # The first tile of this expert: those before it are at most so many with slots, and have no more tiles than that.
    first_tile = tl.minimum(expert, lower) + lower // TILE
    end_tile = tl.minimum(expert + 1, lower + count) + (lower + count) // TILE
    is_last = expert == tl.num_programs(0) - 1
    end_tile = tl.where(is_last, num_tiles, end_tile)
    for start in range(first_tile, end_tile, 16):
        tiles = start + tl.arange(0, 16)
        begin = lower + (tiles - first_tile) * TILE
        end = tl.minimum(begin + TILE, lower + count)
        inside = tiles < end_tile
        tl.store(tiles_ptr + tiles, tl.where(begin < end, expert, -1), mask=inside)
        tl.store(tiles_ptr + num_tiles + tiles, begin, mask=inside)
        tl.store(tiles_ptr + 2 * num_tiles + tiles, end, mask=inside)


def sort_slots(expert_ids: Tensor, num_experts: int, tile: int) -> SortedSlots:
    """expert_ids [n, k] int32, each below num_experts -> tiles of at most `tile` slots.

    The number of tiles depends on shapes alone: what experts do not need is padding.
    """
    num_slots = expert_ids.numel()
    num_tiles = num_slots // tile + min(num_experts, num_slots)
    new = torch.empty(num_slots + 3 * num_tiles, dtype=torch.int32, device=expert_ids.device)
    order, tiles = new[:num_slots], new[num_slots:].view(3, num_tiles)
    at_once = max(16, min(_AT_ONCE, int(triton.next_power_of_2(num_slots))))
    _sort_kernel[(num_experts,)](
        expert_ids,
        order,
        tiles,
        num_slots,
        num_tiles,
        TILE=tile,
        AT_ONCE=at_once,
        ONE=num_slots <= at_once,
        num_warps=4 if at_once <= 2048 else 8,
        **launch_options(),
    )
    return SortedSlots(order, tiles, tile)
