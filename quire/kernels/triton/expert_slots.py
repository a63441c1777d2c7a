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
_MANY = 8 * _AT_ONCE  # from which on they are counted in chunks first: a program for each expert would look at all
_CHUNK = 128  # slots


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
    _write_tiles(tiles_ptr, num_tiles, expert, lower, count, TILE)


@triton.jit
def _write_tiles(tiles_ptr, num_tiles, expert, lower, count, TILE: tl.constexpr):
    """The tiles of an expert that has `count` slots behind `lower` of experts before it."""
    # At most min(expert, lower) experts before this one have slots: each has one tile that is not full, at most.
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


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(
    ids_ptr, counts_ptr, num_slots, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """A program counts each expert's slots of a chunk."""
    begin_dependent(PDL)
    slots = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.where(ids < 0, EXPERTS, ids), BINS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + bins, counts, mask=bins < EXPERTS)


@triton.jit(do_not_specialize=["num_chunks"])
def _add_counts_kernel(
    counts_ptr, totals_ptr, num_chunks, EXPERTS: tl.constexpr, SOME: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program replaces the counts of some experts by those of the chunks before, and leaves their totals."""
    begin_dependent(PDL)
    experts = tl.program_id(0) * SOME + tl.arange(0, SOME)
    inside = experts < EXPERTS
    total = tl.zeros([SOME], tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)
        at, mask = counts_ptr + chunks[:, None] * EXPERTS + experts[None, :], (chunks < num_chunks)[:, None]
        counts = tl.load(at, mask=mask & inside[None, :], other=0)
        tl.store(at, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=mask & inside[None, :])
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + experts, total, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def _tile_experts_kernel(
    totals_ptr, lower_ptr, tiles_ptr, num_tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program writes an expert's tiles, and how many slots are of experts before it."""
    begin_dependent(PDL)
    expert, bins = tl.program_id(0), tl.arange(0, BINS)
    lower = tl.sum(tl.load(totals_ptr + bins, mask=bins < expert, other=0))
    tl.store(lower_ptr + expert, lower)
    _write_tiles(tiles_ptr, num_tiles, expert, lower, tl.load(totals_ptr + expert), TILE)


@triton.jit(do_not_specialize=["num_slots"])
def _place_kernel(
    ids_ptr, counts_ptr, lower_ptr, order_ptr, num_slots, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program places the slots of a chunk behind those of the same experts in chunks before."""
    begin_dependent(PDL)
    first = tl.program_id(0) * CHUNK
    places = tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + first + places, mask=first + places < num_slots, other=-1)
    others = tl.load(ids_ptr + first + places, mask=first + places < num_slots, other=-1)
    same = (ids[:, None] == others[None, :]) & (places[None, :] < places[:, None])
    rank = tl.sum(same.to(tl.int32), axis=1)
    at = tl.load(lower_ptr + ids, mask=ids >= 0, other=0)
    at += tl.load(counts_ptr + tl.program_id(0) * EXPERTS + ids, mask=ids >= 0, other=0)
    tl.store(order_ptr + at + rank, first + places, mask=ids >= 0)


def sort_slots(expert_ids: Tensor, num_experts: int, tile: int) -> SortedSlots:
    """expert_ids [n, k] int32, each below num_experts -> tiles of at most `tile` slots.

    The number of tiles depends on shapes alone: what experts do not need is padding.
    """
    num_slots = expert_ids.numel()
    num_tiles = num_slots // tile + min(num_experts, num_slots)
    new = torch.empty(num_slots + 3 * num_tiles, dtype=torch.int32, device=expert_ids.device)
    order, tiles = new[:num_slots], new[num_slots:].view(3, num_tiles)
    if num_slots >= _MANY:
        _sort_many(expert_ids, order, tiles, num_experts, tile)
        return SortedSlots(order, tiles, tile)
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


def _sort_many(expert_ids: Tensor, order: Tensor, tiles: Tensor, num_experts: int, tile: int) -> None:
    num_slots = order.shape[0]
    chunks, bins = triton.cdiv(num_slots, _CHUNK), triton.next_power_of_2(num_experts + 1)
    counts = torch.empty((chunks + 2) * num_experts, dtype=torch.int32, device=order.device)
    totals, lower = counts[chunks * num_experts :].view(2, num_experts)
    of_experts = {"EXPERTS": num_experts, **launch_options()}
    _count_kernel[(chunks,)](expert_ids, counts, num_slots, BINS=bins, CHUNK=_CHUNK, **of_experts)
    _add_counts_kernel[(triton.cdiv(num_experts, 32),)](counts, totals, chunks, SOME=32, CHUNKS=64, **of_experts)
    _tile_experts_kernel[(num_experts,)](totals, lower, tiles, tiles.shape[1], BINS=bins, TILE=tile, **of_experts)
    _place_kernel[(chunks,)](expert_ids, counts, lower, order, num_slots, CHUNK=_CHUNK, **of_experts)
