"""Attention of one query per row over the paged cache, its work cut evenly whatever the rows' lengths.

The tiles of keys of all rows stand in one line, once for each KV head, and every program takes an equal piece of it.
So no program waits for a longer one, and loads go on from one row to the next. A row that is cut between programs
is put together afterwards. The cache is [2, num_blocks, num_kv_heads, block_size, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, kv_stages, launch_options, padded_dim
from quire.kernels.triton.widen import widened

KEYS = 64  # of a tile
_MIN_QUERIES = 16  # the smallest tile of a matrix unit
_FIRST = 1 << 16  # flags beside a tile's number of keys
_LAST = 1 << 17
_MAX_LINE_BYTES = 256  # of one key


@dataclass(frozen=True, slots=True)
class TileLine:
    """The tiles of all rows of a step, row after row. The same for every layer of a KV group."""

    starts: Tensor  # [rows + 1] int32: each row's first tile; the last entry is the number of tiles
    rows: Tensor  # [most tiles] int32: whose tile it is
    sizes: Tensor  # [most tiles] int32: its keys, and whether it is a row's first or last
    blocks: Tensor  # [most tiles, KEYS / block_size] int32


@triton.jit(do_not_specialize=["contexts_ptr", "count"])
def _line_kernel(
    contexts_ptr,
    rows_ptr,
    tables_ptr,
    starts_ptr,
    tile_rows_ptr,
    sizes_ptr,
    blocks_ptr,
    table_stride,
    count,
    padding_row,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    place = tl.program_id(0)
    others = tl.arange(0, ROWS)
    present = others < count
    present = present & (tl.load(rows_ptr + others, mask=present, other=0) != padding_row)
    tiles = tl.cdiv(tl.load(contexts_ptr + others, mask=present, other=0), KEYS)
    start = tl.sum(tl.where(others < place, tiles, 0), axis=0)
    tl.store(starts_ptr + place, start)
    if place == 0:
        tl.store(starts_ptr + count, tl.sum(tiles, axis=0))
    context = tl.load(contexts_ptr + place)
    row = tl.load(rows_ptr + place).to(tl.int64)
    mine = tl.where(row == padding_row, 0, tl.cdiv(context, KEYS))
    PER_TILE: tl.constexpr = KEYS // BLOCK_SIZE
    for begin in range(0, mine, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        inside = at < mine
        size = tl.minimum(context - at * KEYS, KEYS)
        size += tl.where(at == 0, FIRST, 0) + tl.where(at == mine - 1, LAST, 0)
        tl.store(tile_rows_ptr + start + at, tl.full([CHUNK], 0, tl.int32) + place, mask=inside)
        tl.store(sizes_ptr + start + at, size, mask=inside)
        cells = begin * PER_TILE + tl.arange(0, CHUNK * PER_TILE)
        known = tl.load(tables_ptr + row * table_stride + cells, mask=cells * BLOCK_SIZE < context, other=0)
        tl.store(blocks_ptr + start.to(tl.int64) * PER_TILE + cells, known, mask=cells < mine * PER_TILE)


@triton.jit(do_not_specialize=["count"])
def _even_kernel(
    q_ptr,
    cache_ptr,
    starts_ptr,
    tile_rows_ptr,
    sizes_ptr,
    blocks_ptr,
    sinks_ptr,  # [heads] float32, or None
    out_ptr,
    parts_ptr,  # [programs, 2, heads of a KV head, dim] float32: of a row begun before, and of one that goes on after
    lse_ptr,  # [programs, 2, heads of a KV head] float32
    count,
    value_offset,
    scale,
    soft_cap,
    out_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    PER_TILE: tl.constexpr = KEYS // BLOCK_SIZE
    program = tl.program_id(0)
    total = tl.load(starts_ptr + count)
    share = tl.cdiv(total * NUM_KV_HEADS, tl.num_programs(0))
    begin = program * share
    end = tl.minimum(begin + share, total * NUM_KV_HEADS)
    if begin >= end:
        return
    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    keys = tl.arange(0, KEYS)
    in_head = dims < HEAD_DIM
    of_query = (queries < GROUP)[:, None] & in_head[None, :]
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    kv_head = begin // total
    tile = begin - kv_head * total
    size = tl.load(sizes_ptr + tile)
    place = tl.load(tile_rows_ptr + tile)
    block = tl.load(blocks_ptr + tile.to(tl.int64) * PER_TILE + keys // BLOCK_SIZE)
    for at in range(begin, end):
        # What the next tile is, is known before its keys are asked for: they need not wait for that.
        is_end = tile + 1 == total
        next_tile = tl.where(is_end, 0, tile + 1)
        next_size = tl.load(sizes_ptr + next_tile)
        next_place = tl.load(tile_rows_ptr + next_tile)
        next_block = tl.load(blocks_ptr + next_tile.to(tl.int64) * PER_TILE + keys // BLOCK_SIZE)
        visible = keys < (size & (FIRST - 1))
        cell = ((block.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        cells = cell[:, None] + dims[None, :]
        mask = visible[:, None] & in_head[None, :]  # what is not seen is not read: it may be anything
        k = tl.load(cache_ptr + cells, mask=mask, other=0.0)
        v = tl.load(cache_ptr + value_offset + cells, mask=mask, other=0.0)
        is_new = (size & FIRST) != 0
        # Loaded anew for every tile: a branch here would hold up the loads of keys and values.
        heads = kv_head * GROUP + queries
        q_at = (place.to(tl.int64) * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=of_query, other=0.0)
        scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee") * scale
        if HAS_CAP:
            scores = soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        before = tl.where(is_new, float("-inf"), highest)
        highest = tl.maximum(before, tl.max(scores, axis=1))  # a tile has at least one key
        weights = tl.exp(scores - highest[:, None])
        decay = tl.exp(before - highest)
        weight = weight * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), widened(v, q.dtype), input_precision="ieee")
        is_last = (size & LAST) != 0
        if is_last | (at == end - 1):
            first = kv_head * total + tl.load(starts_ptr + place)
            result = acc / weight[:, None]
            if is_last & (first >= begin):
                if sinks_ptr is not None:
                    sinks = tl.load(sinks_ptr + heads, mask=queries < GROUP, other=0.0)
                    result = acc / (weight + tl.exp(sinks - highest))[:, None]
                tl.store(out_ptr + q_at, (result * out_scale).to(out_ptr.dtype.element_ty), mask=of_query)
            else:
                line = (program * 2 + (first >= begin).to(tl.int32)) * GROUP + queries
                tl.store(parts_ptr + line[:, None] * HEAD_DIM + dims[None, :], result, mask=of_query)
                tl.store(lse_ptr + line, highest + tl.log(weight), mask=queries < GROUP)
        kv_head += is_end.to(tl.int32)
        tile = next_tile
        size = next_size
        place = next_place
        block = next_block


@triton.jit(do_not_specialize=["count"])
def _join_kernel(
    starts_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    count,
    programs,
    out_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    total = tl.load(starts_ptr + count)
    start = tl.load(starts_ptr + place)
    tiles = tl.load(starts_ptr + place + 1) - start
    share = tl.maximum(tl.cdiv(total * NUM_KV_HEADS, programs), 1)
    first = (kv_head * total + start) // share
    last = (kv_head * total + start + tl.maximum(tiles, 1) - 1) // share
    if (first == last) & (tiles > 0):  # one program has done it all
        return
    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    in_group = queries < GROUP
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    if tiles > 0:
        for program in range(first, last + 1):
            line = (program * 2 + (program == first).to(tl.int32)) * GROUP + queries
            lse = tl.load(lse_ptr + line, mask=in_group, other=0.0)
            part = tl.load(parts_ptr + line[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            before = highest
            highest = tl.maximum(before, lse)
            decay = tl.exp(before - highest)
            share_of_part = tl.exp(lse - highest)
            weight = weight * decay + share_of_part
            acc = acc * decay[:, None] + part * share_of_part[:, None]
    heads = kv_head * GROUP + queries
    if sinks_ptr is not None:
        weight += tl.exp(tl.load(sinks_ptr + heads, mask=in_group, other=0.0) - highest)
    result = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]  # zeros for padding, which has no tiles
    out_at = (place.to(tl.int64) * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, (result * out_scale).to(out_ptr.dtype.element_ty), mask=mask)


def tiles_fit(block_size: int) -> bool:
    """Whether tiles are whole blocks."""
    return KEYS % block_size == 0


def heads_fit(head_dim: int, itemsize: int) -> bool:
    """Whether a multiprocessor has room for the tiles of keys and values that are on their way."""
    return padded_dim(head_dim) * itemsize <= _MAX_LINE_BYTES


def line_up_tiles(contexts: Tensor, rows: Tensor, tables: Tensor, block_size: int, padding_row: int) -> TileLine:
    """The tiles of rows [n] int64 of `tables` [max_rows, max_blocks] int32; contexts [n] int32.

    Where rows[i] is `padding_row` there are none.
    """
    count, device = contexts.shape[0], contexts.device
    most = count * triton.cdiv(tables.shape[1] * block_size, KEYS)
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    tile_rows = torch.empty(most, dtype=torch.int32, device=device)
    sizes = torch.empty(most, dtype=torch.int32, device=device)
    blocks = torch.empty(most, KEYS // block_size, dtype=torch.int32, device=device)
    _line_kernel[(count,)](
        contexts,
        rows,
        tables,
        starts,
        tile_rows,
        sizes,
        blocks,
        tables.stride(0),
        count,
        padding_row,
        BLOCK_SIZE=block_size,
        KEYS=KEYS,
        FIRST=_FIRST,
        LAST=_LAST,
        ROWS=triton.next_power_of_2(count),
        CHUNK=32,
        num_warps=4,
        **launch_options(),
    )
    return TileLine(starts, tile_rows, sizes, blocks)


def even_attention(
    q: Tensor,
    cache: Tensor,
    line: TileLine,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    programs: int,
    num_warps: int = 4,
    num_stages: int = 3,
    sinks: Tensor | None = None,
    out_scale: float = 1.0,
) -> None:
    """q [n, heads, dim] is a query of each row of `line`; writes out [n, heads * dim], zeros where no tiles are.

    sinks [heads] float32: see AttentionSpec. The result is multiplied by out_scale.
    """
    count, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    group = num_heads // num_kv_heads
    dim = padded_dim(head_dim)
    parts = torch.empty(programs, 2, group, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(programs, 2, group, dtype=torch.float32, device=q.device)
    _even_kernel[(programs,)](
        q,
        cache,
        line.starts,
        line.rows,
        line.sizes,
        line.blocks,
        sinks,
        out,
        parts,
        lse,
        count,
        cache.stride(0),
        scale,
        soft_cap or 0.0,
        out_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_CAP=soft_cap is not None,
        QUERIES=max(_MIN_QUERIES, triton.next_power_of_2(group)),
        DIM=dim,
        KEYS=KEYS,
        FIRST=_FIRST,
        LAST=_LAST,
        num_warps=num_warps,
        num_stages=kv_stages(num_stages, KEYS, dim * q.element_size()),
        **launch_options(),
    )
    _join_kernel[(count, num_kv_heads)](
        line.starts,
        sinks,
        out,
        parts,
        lse,
        count,
        programs,
        out_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        QUERIES=triton.next_power_of_2(group),
        DIM=dim,
        num_warps=1,
        **launch_options(),
    )
