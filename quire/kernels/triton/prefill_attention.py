"""Causal attention of many queries per row over the paged cache: prefill, with or without a cached prefix.

The cache is [2, num_blocks, num_kv_heads, block_size, head_dim] and already holds the queries' own keys. Work is
cut into tiles of QUERY_TILE queries of one row; the caller lists them. Where there are few tiles and many keys,
several programs share the keys of a tile (split-KV), and a second kernel folds what they found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import FUSED, add_sinks, first_seen, heads_of, shared_memory
from quire.kernels.triton.widen import widened

QUERY_TILE = 128
_WIDE = 256  # bytes of a head
_MIN_KEYS = 16
_BESIDE = 16 << 10  # bytes, beside keys and values
_FOLDED = 2  # programs that fold the queries of one


@triton.jit
def _find_queries(
    place, tile_index_ptr, tile_offset_ptr, query_starts_ptr, PARTS: tl.constexpr, QUERIES: tl.constexpr
):
    """(row, first query, row's first token, row's queries) of part `place` of the tiles; padding has no queries."""
    index = tl.load(tile_index_ptr + place // PARTS)
    offset = tl.load(tile_offset_ptr + place // PARTS) + place % PARTS * QUERIES
    row = tl.maximum(index, 0)  # -1 is padding of a captured step
    query_start = tl.load(query_starts_ptr + row)
    count = tl.load(query_starts_ptr + row + 1) - query_start
    return row, tl.where(index < 0, 0, offset), query_start, tl.where(index < 0, 0, count)


@triton.jit
def _capped(scores, soft_cap):
    return soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)


@triton.jit
def _store_numbers(at, number_offset, highest, total, mask):
    tl.store(at, highest, mask=mask)
    tl.store(at + number_offset, total, mask=mask)


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr"])
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,  # [tiles] which row of the batch
    tile_offset_ptr,  # [tiles] first query of the tile within its row
    sinks_ptr,  # [heads] float32, or None
    out_ptr,
    parts_ptr,  # [tokens, heads, SPLITS, dim] float32
    numbers_ptr,  # [2, tokens, heads, SPLITS] float32: highest scores, sums of weights
    table_stride,
    value_offset,
    number_offset,
    scale,
    soft_cap,
    out_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TILE: tl.constexpr,  # queries of a listed tile
    LINES: tl.constexpr,  # queries times heads of a program
    HEADS: tl.constexpr,  # of a program; all of one KV head
    SPLITS: tl.constexpr,  # programs that share the keys of a tile; 0: one has them all
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Later tiles see more keys: starting with them evens out the end of the launch.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    QUERIES: tl.constexpr = LINES // HEADS
    index, offset, query_start, count = _find_queries(
        place, tile_index_ptr, tile_offset_ptr, query_starts_ptr, TILE // QUERIES, QUERIES
    )
    if offset >= count:
        return
    context = tl.load(contexts_ptr + index)
    row = tl.load(rows_ptr + index).to(tl.int64)
    first_position = context - count + offset
    lines = tl.arange(0, LINES)
    queries, head = lines // HEADS, tl.program_id(1) * HEADS + lines % HEADS
    kv_head = tl.program_id(1) * HEADS // (NUM_HEADS // NUM_KV_HEADS)
    dims = tl.arange(0, DIM)
    in_head, in_row = dims < HEAD_DIM, offset + queries < count
    positions = first_position + queries
    line = (query_start + offset + queries).to(tl.int64) * NUM_HEADS + head
    at = line[:, None] * HEAD_DIM + dims[None, :]
    q_mask = in_row[:, None] & in_head[None, :]
    q = tl.load(q_ptr + at, mask=q_mask, other=0.0)
    # Scaled queries would have to be loaded anew for every product, and each matrix instruction wait for the last.
    to_base_2 = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    highest = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM], tl.float32)
    end = tl.minimum(context, first_position + QUERIES)
    begin = tl.maximum(first_seen(first_position, WINDOW), 0) // KEYS * KEYS if WINDOW != 0 else 0
    stop = end
    if SPLITS > 0:
        share = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
        begin = begin + tl.program_id(2) * share
        stop = tl.minimum(begin + share, end)
    for start in range(begin, stop, KEYS):
        keys = start + tl.arange(0, KEYS)
        exists = keys < end
        if WINDOW != 0:
            exists = exists & (keys >= first_seen(first_position, WINDOW))  # others' blocks may hold anything
        block = tl.load(tables_ptr + row * table_stride + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        k_at = cell[:, None] + dims[None, :]
        kv_mask = exists[:, None] & in_head[None, :]
        k = widened(tl.load(cache_ptr + k_at, mask=kv_mask, other=0.0), q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            scores = _capped(scores * scale, soft_cap)
        if start + KEYS > first_position:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        if WINDOW != 0:
            scores = tl.where(keys[None, :] >= first_seen(positions, WINDOW)[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * to_base_2)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * to_base_2 - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        v = widened(tl.load(cache_ptr + value_offset + k_at, mask=kv_mask, other=0.0), q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = new_highest
    if SPLITS > 0:
        part = line * SPLITS + tl.program_id(2)
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=q_mask)
        _store_numbers(numbers_ptr + part, number_offset, highest, total, in_row)
    else:
        total = add_sinks(sinks_ptr, head, in_row, highest, total)
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None] * out_scale
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr"])
def _fold_kernel(
    query_starts_ptr,
    tile_index_ptr,
    tile_offset_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    numbers_ptr,
    number_offset,
    out_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Attention of some queries and one head, from what the programs that shared their keys found."""
    place, head = tl.program_id(0), tl.program_id(1)
    _, offset, query_start, count = _find_queries(
        place, tile_index_ptr, tile_offset_ptr, query_starts_ptr, TILE // QUERIES, QUERIES
    )
    if offset >= count:
        return
    queries, dims = tl.arange(0, QUERIES), tl.arange(0, DIM)
    in_row = offset + queries < count
    line = (query_start + offset + queries).to(tl.int64) * NUM_HEADS + head
    mask = in_row[:, None] & (dims < HEAD_DIM)[None, :]
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        part = line * SPLITS + split
        part_highest = tl.load(numbers_ptr + part, mask=in_row, other=float("-inf"))
        new_highest = tl.maximum(highest, part_highest)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        keep, add = tl.exp2(highest - shift), tl.exp2(part_highest - shift)
        total = total * keep + tl.load(numbers_ptr + number_offset + part, mask=in_row, other=0.0) * add
        values = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        acc = acc * keep[:, None] + values * add[:, None]
        highest = new_highest
    total = add_sinks(sinks_ptr, head + tl.zeros_like(queries), in_row, highest, total)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None] * out_scale
    tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


class Split(NamedTuple):
    """How the keys of tiles are shared between programs."""

    splits: int  # programs that share the keys of a tile
    heads: int = 1  # of a program, all of one KV head: it has QUERY_TILE // heads queries
    keys: int = 128  # at a time


def prefill_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    query_starts: Tensor,
    tile_index: Tensor,
    tile_offset: Tensor,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    window: int,
    query_tile: int = QUERY_TILE,
    keys: int = 128,
    split: Split | None = None,
    sinks: Tensor | None = None,
    out_scale: float = 1.0,
) -> None:
    """Attention of the listed tiles of queries: q [n, heads, dim] to their lines of out [n, heads * dim].

    contexts, query_starts, tile_index and tile_offset are int32; `rows` picks lines of tables [max_rows, max_blocks].
    With `split` each token of the step has a line of partial results, listed or not. sinks [heads] float32: see
    AttentionSpec. The result is multiplied by out_scale.
    """
    num_tokens, num_heads, head_dim = q.shape
    heads = heads_of(q, cache, soft_cap, window)
    width, num_stages = heads["DIM"] * q.element_size(), 2
    splits, packed = 0, 1
    parts, numbers = out, out
    if split is not None:
        splits, packed, keys = split
        parts = torch.empty(num_tokens, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        numbers = torch.empty(2, num_tokens, num_heads, splits, dtype=torch.float32, device=q.device)
    if width > _WIDE:  # fewer keys at a time, for a multiprocessor to have room for them
        keys, num_stages = (min(keys, 64), 2) if width <= 2 * _WIDE else (min(keys, 32), 1)
    beside = query_tile * width + _BESIDE // 2 if width > _WIDE else _BESIDE  # wide queries stay there, too
    while keys > _MIN_KEYS and 2 * num_stages * keys * width + beside > shared_memory():
        keys //= 2
    number_offset = num_tokens * num_heads * splits
    programs = tile_index.shape[0] * packed
    _prefill_kernel[(programs, num_heads // packed, max(1, splits))](
        q,
        cache,
        tables,
        rows,
        contexts,
        query_starts,
        tile_index,
        tile_offset,
        sinks,
        out,
        parts,
        numbers,
        tables.stride(0),
        cache.stride(0),
        number_offset,
        scale,
        soft_cap or 0.0,
        out_scale,
        TILE=query_tile,
        LINES=query_tile,
        HEADS=packed,
        SPLITS=splits,
        KEYS=keys,
        num_warps=8,
        num_stages=num_stages,
        **heads,
        **FUSED,
    )
    if splits:
        _fold_kernel[(programs * _FOLDED, num_heads)](
            query_starts,
            tile_index,
            tile_offset,
            sinks,
            out,
            parts,
            numbers,
            number_offset,
            out_scale,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            TILE=query_tile,
            QUERIES=query_tile // packed // _FOLDED,
            SPLITS=splits,
            DIM=heads["DIM"],
            num_warps=4,
            **FUSED,
        )
