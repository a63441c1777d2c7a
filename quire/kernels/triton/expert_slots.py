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

_CELLS = 1 << 15  # of the matrix of slots x experts that one program counts over


class SortedSlots(NamedTuple):
    """Tile t are the slots order[begin[t]:end[t]], all of expert[t]; an expert of -1 is padding."""

    order: Tensor  # [n * k] int32
    tiles: Tensor  # [3, tiles] int32: expert, begin, end
    size: int  # slots of a tile, at most


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, num_slots, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr):
    """counts [chunks, EXPERTS]: how many slots of each chunk every expert has."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    slots, experts = chunk * SLOTS + tl.arange(0, SLOTS), tl.arange(0, EXPERTS)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    tl.store(counts_ptr + chunk * EXPERTS + experts, tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), axis=0))


@triton.jit
def _sort_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_slots,
    num_chunks,
    num_tiles,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,  # of a chunk, which one program places
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # that one program writes
    ONE: tl.constexpr,  # there is one chunk, and nobody has counted
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    slots, experts = chunk * SLOTS + tl.arange(0, SLOTS), tl.arange(0, EXPERTS)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    chosen = (ids[:, None] == experts[None, :]).to(tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)  # slots of each expert in chunks before this one
    if ONE:
        total = tl.sum(chosen, axis=0)
    else:
        total = tl.zeros([EXPERTS], tl.int32)
        for other in range(num_chunks):
            count = tl.load(counts_ptr + other * EXPERTS + experts)
            total += count
            before += tl.where(other < chunk, count, 0)
    begins = tl.cumsum(total, axis=0) - total
    ranks = tl.cumsum(chosen, axis=0) - 1 + (begins + before)[None, :]
    places = tl.sum(tl.where(chosen > 0, ranks, 0), axis=1)
    tl.store(order_ptr + places, slots, mask=ids >= 0)
    # The tiles, some by each program: tile t is of the first expert whose tiles, and those before, are more than t.
    last_tiles = tl.cumsum((total + TILE - 1) // TILE, axis=0)
    first_tiles = last_tiles - (total + TILE - 1) // TILE
    for first in range(chunk * TILES, num_tiles, tl.num_programs(0) * TILES):
        tiles = first + tl.arange(0, TILES)
        has = (first_tiles[None, :] <= tiles[:, None]) & (tiles[:, None] < last_tiles[None, :])
        begin = begins[None, :] + (tiles[:, None] - first_tiles[None, :]) * TILE
        end = tl.minimum(begin + TILE, (begins + total)[None, :])
        expert = tl.max(tl.where(has, experts[None, :], -1), axis=1)
        inside = tiles < num_tiles
        tl.store(tiles_ptr + tiles, expert, mask=inside)
        tl.store(tiles_ptr + num_tiles + tiles, tl.sum(tl.where(has, begin, 0), axis=1), mask=inside)
        tl.store(tiles_ptr + 2 * num_tiles + tiles, tl.sum(tl.where(has, end, 0), axis=1), mask=inside)


def sort_slots(expert_ids: Tensor, num_experts: int, tile: int) -> SortedSlots:
    """expert_ids [n, k] int32, each below num_experts -> tiles of at most `tile` slots.

    The number of tiles depends on shapes alone: what experts do not need is padding.
    """
    num_slots = expert_ids.numel()
    experts = max(2, int(triton.next_power_of_2(num_experts)))
    slots = max(16, min(_CELLS // experts, int(triton.next_power_of_2(num_slots))))
    num_chunks = triton.cdiv(num_slots, slots)
    num_tiles = min(num_slots, num_slots // tile + num_experts)
    new = torch.empty(num_slots + 3 * num_tiles, dtype=torch.int32, device=expert_ids.device)
    order, tiles = new[:num_slots], new[num_slots:].view(3, num_tiles)
    counts = order
    if num_chunks > 1:
        counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=expert_ids.device)
        _count_kernel[(num_chunks,)](
            expert_ids, counts, num_slots, EXPERTS=experts, SLOTS=slots, num_warps=8, **launch_options()
        )
    _sort_kernel[(num_chunks,)](
        expert_ids,
        counts,
        order,
        tiles,
        num_slots,
        num_chunks,
        num_tiles,
        EXPERTS=experts,
        SLOTS=slots,
        TILE=tile,
        TILES=max(1, min(64, _CELLS // experts)),
        ONE=num_chunks == 1,
        num_warps=8,
        **launch_options(),
    )
    return SortedSlots(order, tiles, tile)
