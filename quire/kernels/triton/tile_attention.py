"""Attention of tiles of queries over the paged cache, the keys cut into segments that are computed apart and folded.

The cache is [2, num_blocks, num_kv_heads, block_size, head_dim] and already holds the queries' own keys. All query
heads that share a KV head are packed into one tile, so keys and values are read once. With segments at fixed
positions the arithmetic of a query depends on nothing but its own keys: `split` (segments over programs, then
folded by a second kernel) and `fold` (one program walks them all) give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import add_sinks, begin_dependent, first_seen, heads_of, kv_stages, launch_options
from quire.kernels.triton.segments import fold, line_sums, nothing, take_in
from quire.kernels.triton.widen import widened

_MIN_LINES = 16  # the smallest tile of a matrix unit
_FOLDED_AT_ONCE = 8


@triton.jit
def _take_in(
    q,
    positions,
    highest,
    totals,
    acc,
    start,
    end,
    cache_ptr,
    table_ptr,
    kv_head,
    first_position,
    value_offset,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DIM: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """`take_in` of the keys [start, start + KEYS) before `end`, from the cache."""
    dims = tl.arange(0, DIM)
    keys = start + tl.arange(0, KEYS)
    exists = keys < end
    if WINDOW != 0:
        exists = exists & (keys >= first_seen(first_position, WINDOW))  # blocks that no query sees may hold anything
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
    at = cell[:, None] + dims[None, :]
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    k = widened(tl.load(cache_ptr + at, mask=mask, other=0.0), q.dtype)
    v = widened(tl.load(cache_ptr + value_offset + at, mask=mask, other=0.0), q.dtype)
    return take_in(
        q, k, v, positions, first_position, start, highest, totals, acc, scale, soft_cap, WINDOW, HAS_CAP, LINES, KEYS
    )


@triton.jit
def _split_size(seen, SPLITS: tl.constexpr, LONG: tl.constexpr, KEYS: tl.constexpr):
    """Keys of each split of a row that sees these."""
    return tl.cdiv(tl.cdiv(seen, KEYS), tl.where(seen < LONG, SPLITS // 2, SPLITS)) * KEYS


@triton.jit
def _keep(
    parts_ptr, numbers_ptr, number_offset, at, highest, total, acc, mask, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Store what a segment gave, for `_fold_kernel`."""
    dims = tl.arange(0, DIM)
    in_head = mask[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(parts_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_head)
    tl.store(numbers_ptr + at, highest, mask=mask)
    tl.store(numbers_ptr + number_offset + at, total, mask=mask)


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr"])
def _tile_kernel(
    q_ptr,
    cache_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,  # [tiles] which row of the batch; -1 is padding of a captured step
    tile_offset_ptr,  # [tiles] first query of the tile within its row
    sinks_ptr,  # [heads] float32, or None
    out_ptr,  # [tokens, heads, dim]
    parts_ptr,  # [tiles, TILE, heads, segments, dim] float32
    numbers_ptr,  # [2, tiles, TILE, heads, segments] float32: highest scores, sums of weights
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
    WINDOW: tl.constexpr,  # see first_seen
    HAS_CAP: tl.constexpr,
    TILE: tl.constexpr,  # queries of a listed tile
    TOKENS: tl.constexpr,  # queries of a program
    LINES: tl.constexpr,  # at least TOKENS times the query heads per KV head
    SEGMENT: tl.constexpr,  # keys per segment; 0: the row's keys over SPLITS
    NUM_SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,  # programs over the segments; 0: one program folds them
    LONG: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    SUB: tl.constexpr = (TILE + TOKENS - 1) // TOKENS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # Later tiles see more keys: starting with them evens out the end of the launch.
    place, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    index = tl.load(tile_index_ptr + place // SUB)
    if index < 0:
        return
    offset = tl.load(tile_offset_ptr + place // SUB)
    query_start = tl.load(query_starts_ptr + index)
    count = tl.load(query_starts_ptr + index + 1) - query_start
    first = offset + place % SUB * TOKENS
    last = tl.minimum(tl.minimum(count, offset + TILE), first + TOKENS)
    if first >= last:
        return
    context = tl.load(contexts_ptr + index)
    table = tables_ptr + tl.load(rows_ptr + index).to(tl.int64) * table_stride
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIM)
    query, head = first + lines // GROUP, kv_head * GROUP + lines % GROUP
    inside, seen = query < last, context - count + last  # keys that the last query sees
    first_position, positions = context - count + first, context - count + query
    q_at = ((query_start + query).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    q_mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    segment_size = SEGMENT if SEGMENT != 0 else _split_size(seen, SPLITS, LONG, KEYS)
    lowest = tl.maximum(first_seen(first_position, WINDOW), 0) // KEYS * KEYS if WINDOW != 0 else 0
    highest, totals, acc = nothing(LINES, DIM, KEYS)
    if SPLITS == 0:
        whole_highest, _, whole = nothing(LINES, DIM, KEYS)
        whole_total = tl.zeros([LINES], tl.float32)
        for start in range(lowest, seen, KEYS):
            # Folded before the next product and not after the last: a branch that reads a product's result at the
            # end of the loop makes every single matrix instruction wait for the one before.
            if start % segment_size == 0:
                total = line_sums(totals, LINES, KEYS)
                whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, acc)
                highest, totals, acc = nothing(LINES, DIM, KEYS)
            highest, totals, acc = _take_in(
                q, positions, highest, totals, acc, start, seen, cache_ptr, table, kv_head, first_position,
                value_offset, scale, soft_cap, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_CAP, DIM, LINES, KEYS,
            )  # fmt: skip
        total = line_sums(totals, LINES, KEYS)
        whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, acc)
        whole_total = add_sinks(sinks_ptr, head, inside, whole_highest, whole_total)
        result = whole / tl.where(whole_total == 0.0, 1.0, whole_total)[:, None] * out_scale
        tl.store(out_ptr + q_at, result.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        number_at = (((place // SUB).to(tl.int64) * TILE + query - offset) * NUM_HEADS + head) * NUM_SEGMENTS
        run = tl.cdiv(tl.cdiv(seen, segment_size), SPLITS) * segment_size  # of segments, for each program
        begin, end = tl.maximum(tl.program_id(2) * run, lowest), tl.minimum((tl.program_id(2) + 1) * run, seen)
        for start in range(begin, end, KEYS):
            highest, totals, acc = _take_in(
                q, positions, highest, totals, acc, start, end, cache_ptr, table, kv_head, first_position,
                value_offset, scale, soft_cap, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_CAP, DIM, LINES, KEYS,
            )  # fmt: skip
            if SEGMENT != 0:  # noqa: SIM102  known when it is compiled
                if (start + KEYS) % SEGMENT == 0 or start + KEYS >= end:
                    at, total = number_at + start // SEGMENT, line_sums(totals, LINES, KEYS)
                    _keep(parts_ptr, numbers_ptr, number_offset, at, highest, total, acc, inside, HEAD_DIM, DIM)
                    highest, totals, acc = nothing(LINES, DIM, KEYS)
        if SEGMENT == 0:  # a branch in the loop would make each matrix instruction wait for the one before
            at, total = number_at + tl.program_id(2), line_sums(totals, LINES, KEYS)
            if begin < end:
                _keep(parts_ptr, numbers_ptr, number_offset, at, highest, total, acc, inside, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr"])
def _fold_kernel(
    parts_ptr,
    numbers_ptr,
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,
    tile_offset_ptr,
    sinks_ptr,
    out_ptr,
    number_offset,
    out_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    LONG: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    place = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.load(tile_index_ptr + place // TILE)
    if index < 0:
        return
    query = tl.load(tile_offset_ptr + place // TILE) + place % TILE
    query_start = tl.load(query_starts_ptr + index)
    count = tl.load(query_starts_ptr + index + 1) - query_start
    if query >= count:
        return
    before = tl.load(contexts_ptr + index) - count
    segment_size = SEGMENT
    if SEGMENT == 0:  # as in the kernel above, from the last query of its program
        program_first = query - place % TILE % TOKENS
        last = tl.minimum(tl.minimum(count, query - place % TILE + TILE), program_first + TOKENS)
        segment_size = _split_size(before + last, SPLITS, LONG, KEYS)
    segments = tl.cdiv(before + query + 1, segment_size)  # later ones hold nothing that this query sees
    line = place.to(tl.int64) * NUM_HEADS + head
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    whole = tl.zeros([1, DIM], tl.float32)
    whole_highest = tl.full([1], float("-inf"), tl.float32)
    whole_total = tl.zeros([1], tl.float32)
    one = tl.arange(0, 1)
    first = 0
    if WINDOW != 0:  # earlier ones hold nothing that it sees either
        first = tl.maximum(first_seen(before + query, WINDOW), 0) // segment_size
    for start in range(first, segments, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            segment = start + step + one
            exists = segment < segments
            at = line * NUM_SEGMENTS + segment
            mask = exists[:, None] & in_head[None, :]
            part = tl.load(parts_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            highest = tl.load(numbers_ptr + at, mask=exists, other=float("-inf"))
            total = tl.load(numbers_ptr + number_offset + at, mask=exists, other=0.0)
            whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, part)
    whole_total = add_sinks(sinks_ptr, head + one, one == 0, whole_highest, whole_total)
    result = whole / tl.where(whole_total == 0.0, 1.0, whole_total)[:, None] * out_scale
    out_at = ((query_start + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=in_head[None, :])


@dataclass(frozen=True)
class Cut:
    """How the work is cut into programs. Of these only `segment` and `keys` can change a bit of the result."""

    tile: int  # queries of a listed tile
    splits: int  # programs that share a tile's keys; 0: one walks them all
    segment: int = 0  # keys of a segment; 0: each split is one segment
    num_segments: int = 0  # most segments there can be, if their size is given
    lines: int = 64  # queries times heads of a program
    keys: int = 64  # keys at a time
    num_warps: int = 4
    num_stages: int = 3  # if there is room for them
    long: int = 0  # keys of a row from which on all splits share them; of a shorter one, half of the splits


def tile_attention(
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
    cut: Cut,
    sinks: Tensor | None = None,
    out_scale: float = 1.0,
) -> None:
    """Attention of the listed tiles of queries: q [n, heads, dim] to their lines of out [n, heads * dim].

    contexts [rows] (KV lengths after this step), query_starts, tile_index and tile_offset are int32; `rows` picks
    lines of tables [max_rows, max_blocks]. sinks [heads] float32: see AttentionSpec. The result is
    multiplied by out_scale.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.shape[2]
    group = num_heads // num_kv_heads
    tile, splits, segment = cut.tile, cut.splits, cut.segment
    tokens = min(tile, max(cut.lines, triton.next_power_of_2(group)) // group)
    lines = max(_MIN_LINES, triton.next_power_of_2(tokens * group))
    num_segments = cut.num_segments if segment else splits
    parts, numbers = out, out
    listed = tile_index.shape[0] * tile
    if splits:
        parts = torch.empty(listed, num_heads, num_segments, head_dim, dtype=torch.float32, device=q.device)
        numbers = torch.empty(2, listed, num_heads, num_segments, dtype=torch.float32, device=q.device)
    number_offset = listed * num_heads * num_segments
    shared = {
        **heads_of(q, cache, soft_cap, window),
        "TILE": tile,
        "TOKENS": tokens,
        "SEGMENT": segment,
        "NUM_SEGMENTS": num_segments,
        "SPLITS": splits,
        "LONG": cut.long,
        "KEYS": cut.keys,
        **launch_options(),
    }
    programs = tile_index.shape[0] * triton.cdiv(tile, tokens)
    _tile_kernel[(programs, num_kv_heads, max(1, splits))](
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
        LINES=lines,
        num_warps=cut.num_warps,
        num_stages=kv_stages(cut.num_stages, cut.keys, shared["DIM"] * q.element_size()),
        **shared,
    )
    if splits:
        _fold_kernel[(listed, num_heads)](
            parts,
            numbers,
            contexts,
            query_starts,
            tile_index,
            tile_offset,
            sinks,
            out,
            number_offset,
            out_scale,
            AT_ONCE=_FOLDED_AT_ONCE,
            num_warps=1,
            **shared,
        )
