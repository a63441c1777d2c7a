"""Attention over latents in the paged cache: one KV head, whose values are the first dimensions of its keys.

The cache is [num_blocks, block_size, width] and already holds the queries' own latents. The heads of a token are
packed into one tile, so that latents are read once for up to HEADS of them, as keys and as values. Keys are cut into
segments as in tile_attention.py, whose arithmetic this is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.latent import Segments, segment_shares
from quire.kernels.triton.launch import begin_dependent, launch_options, padded_dim, shared_memory, stages_within
from quire.kernels.triton.segments import _column_sums, fold, line_sums, nothing
from quire.kernels.triton.widen import widened

_MIN_LINES = 16  # the smallest tile of a matrix unit
MAX_HEADS = 32  # of a program: sums of more, on their way to memory, take more than there is of shared memory


@triton.jit
def _take_in(
    q,
    q_rope,
    positions,
    highest,
    totals,
    acc,
    start,
    end,
    cache_ptr,
    table_ptr,
    first_position,
    line_stride,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A segment's highest scores, sums of weights and weighted values with the keys [start, start + KEYS) added."""
    dims, rope_dims = tl.arange(0, DIM), tl.arange(0, ROPE_DIM)
    keys = start + tl.arange(0, KEYS)
    exists = keys < end
    block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    line = cache_ptr + (block * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * line_stride
    in_latent = exists[:, None] & (dims < RANK)[None, :]
    latent = widened(tl.load(line + dims[None, :], mask=in_latent, other=0.0), q.dtype)
    in_rope = exists[:, None] & (rope_dims < ROPE)[None, :]
    shared = widened(tl.load(line + RANK + rope_dims[None, :], mask=in_rope, other=0.0), q.dtype)
    scores = tl.dot(q_rope, tl.trans(shared), input_precision="ieee")
    scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee")
    to_base_2 = scale * 1.4426950408889634
    if start + KEYS > first_position:
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * to_base_2)
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(tl.fma(scores, to_base_2 + tl.zeros_like(scores), tl.zeros_like(scores) - shift[:, None]))
    decay = tl.exp2(highest - shift)
    totals = tl.fma(totals, decay[:, None] + tl.zeros_like(totals), _column_sums(weights, LINES, KEYS))
    acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
    return new_highest, totals, acc


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr", "number_offset"])
def _latent_kernel(
    q_ptr,  # [tokens, heads, RANK + ROPE]
    cache_ptr,
    tables_ptr,
    rows_ptr,
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,  # [tiles] which row of the batch; -1 is padding of a captured step
    tile_offset_ptr,  # [tiles] first query of the tile within its row
    out_ptr,  # [tokens, heads, RANK]
    parts_ptr,  # [tiles, TILE, heads, segments, RANK] float32
    numbers_ptr,  # [2, tiles, TILE, heads, segments] float32: highest scores, sums of weights
    table_stride,
    line_stride,
    number_offset,
    scale,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # queries of a listed tile
    TOKENS: tl.constexpr,  # queries of a program
    HEADS: tl.constexpr,  # of a program
    LINES: tl.constexpr,  # at least TOKENS * HEADS
    SEGMENT: tl.constexpr,  # keys per segment; 0: the row's keys over SPLITS
    NUM_SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,  # programs over the segments; 0: one program walks them all
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    SUB: tl.constexpr = (TILE + TOKENS - 1) // TOKENS
    # Later tiles see more keys: starting with them evens out the end of the launch.
    place, first_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1) * HEADS
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
    lines, dims, rope_dims = tl.arange(0, LINES), tl.arange(0, DIM), tl.arange(0, ROPE_DIM)
    query, head = first + lines // HEADS, first_head + lines % HEADS
    inside = (query < last) & (head < NUM_HEADS)
    first_position, positions = context - count + first, context - count + query
    line = (query_start + query).to(tl.int64) * NUM_HEADS + head
    mask = inside[:, None] & (dims < RANK)[None, :]
    q_at = q_ptr + line[:, None] * (RANK + ROPE)
    q = tl.load(q_at + dims[None, :], mask=mask, other=0.0)
    q_rope = tl.load(q_at + RANK + rope_dims[None, :], mask=inside[:, None] & (rope_dims < ROPE)[None, :], other=0.0)
    seen = context - count + last  # keys that the last query sees
    segment_size = SEGMENT
    if SEGMENT == 0:
        segment_size = tl.cdiv(tl.cdiv(seen, KEYS), tl.maximum(SPLITS, 1)) * KEYS
    highest, totals, acc = nothing(LINES, DIM, KEYS)
    if SPLITS == 0:
        whole_highest, _, whole = nothing(LINES, DIM, KEYS)
        whole_total = tl.zeros([LINES], tl.float32)
        for start in range(0, seen, KEYS):
            if SEGMENT > 0:  # noqa: SIM102  known when it is compiled
                if start % segment_size == 0:
                    total = line_sums(totals, LINES, KEYS)
                    whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, acc)
                    highest, totals, acc = nothing(LINES, DIM, KEYS)
            highest, totals, acc = _take_in(
                q, q_rope, positions, highest, totals, acc, start, seen, cache_ptr, table, first_position,
                line_stride, scale, RANK, ROPE, BLOCK_SIZE, DIM, ROPE_DIM, LINES, KEYS,
            )  # fmt: skip
        total = line_sums(totals, LINES, KEYS)
        if SEGMENT > 0:
            whole_highest, total, acc = fold(whole_highest, whole_total, whole, highest, total, acc)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + line[:, None] * RANK + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        number_at = (((place // SUB).to(tl.int64) * TILE + query - offset) * NUM_HEADS + head) * NUM_SEGMENTS
        run = tl.cdiv(tl.cdiv(seen, segment_size), SPLITS) * segment_size  # of segments, for each program
        begin = tl.program_id(2) * run
        end = tl.minimum(begin + run, seen)
        for start in range(begin, end, KEYS):
            highest, totals, acc = _take_in(
                q, q_rope, positions, highest, totals, acc, start, end, cache_ptr, table, first_position,
                line_stride, scale, RANK, ROPE, BLOCK_SIZE, DIM, ROPE_DIM, LINES, KEYS,
            )  # fmt: skip
            if (start + KEYS) % segment_size == 0 or start + KEYS >= end:
                at = number_at + start // segment_size
                tl.store(parts_ptr + at[:, None] * RANK + dims[None, :], acc, mask=mask)
                tl.store(numbers_ptr + at, highest, mask=inside)
                tl.store(numbers_ptr + number_offset + at, line_sums(totals, LINES, KEYS), mask=inside)
                highest, totals, acc = nothing(LINES, DIM, KEYS)


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr", "number_offset"])
def _fold_kernel(
    parts_ptr,
    numbers_ptr,
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,
    tile_offset_ptr,
    out_ptr,
    number_offset,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    place, head = tl.program_id(0), tl.program_id(1)
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
        segment_size = tl.cdiv(tl.cdiv(before + last, KEYS), SPLITS) * KEYS
    segments = tl.cdiv(before + query + 1, segment_size)  # later ones hold nothing that this query sees
    line = (place.to(tl.int64) * NUM_HEADS + head) * NUM_SEGMENTS
    one, dims = tl.arange(0, 1), tl.arange(0, DIM)
    in_rank = (dims < RANK)[None, :]
    whole = tl.zeros([1, DIM], tl.float32)
    whole_highest = tl.full([1], float("-inf"), tl.float32)
    whole_total = tl.zeros([1], tl.float32)
    for segment in range(0, segments):
        at = line + segment + one
        part = tl.load(parts_ptr + at[:, None] * RANK + dims[None, :], mask=in_rank, other=0.0)
        highest, total = tl.load(numbers_ptr + at), tl.load(numbers_ptr + number_offset + at)
        whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, part)
    result = whole / tl.where(whole_total == 0.0, 1.0, whole_total)[:, None]
    out_at = ((query_start + query).to(tl.int64) * NUM_HEADS + head) * RANK + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=in_rank)


@triton.jit(do_not_specialize=["tile_index_ptr", "number_offset"])
def _fold_single_kernel(
    parts_ptr,
    numbers_ptr,
    contexts_ptr,
    query_starts_ptr,
    tile_index_ptr,
    out_ptr,
    number_offset,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same of single queries whose splits are segments: all of them at once."""
    begin_dependent(PDL)
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(tile_index_ptr + place)
    if index < 0:
        return
    line = (place * NUM_HEADS + head) * SPLITS
    shares, there = segment_shares(numbers_ptr + line, number_offset, tl.load(contexts_ptr + index), KEYS, SPLITS)
    segments, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    in_rank = dims < RANK
    at = parts_ptr + (line + segments)[:, None] * RANK + dims[None, :]
    parts = tl.load(at, mask=there[:, None] & in_rank[None, :], other=0.0)
    result = tl.sum(parts * shares[:, None], axis=0).to(out_ptr.dtype.element_ty)
    out_at = (tl.load(query_starts_ptr + index).to(tl.int64) * NUM_HEADS + head) * RANK + dims
    tl.store(out_ptr + out_at, result, mask=in_rank)


@dataclass(frozen=True)
class LatentCut:
    """How the work is cut into programs. Of these only `segment` and `keys` can change a bit of the result."""

    tile: int  # queries of a listed tile
    splits: int  # programs that share a tile's keys; 0: one walks them all
    segment: int = 0  # keys of a segment; 0: each split is one segment
    num_segments: int = 0  # most segments there can be, if their size is given
    lines: int = 16  # queries times heads of a program
    min_lines: int = _MIN_LINES  # of a tile, most of which may be empty: wider matrix units want 64
    keys: int = 32  # keys at a time
    num_stages: int = 2  # if there is room for them; with more, fewer programs fit on a multiprocessor
    num_warps: int = 0  # 0: by the number of lines, with which sums stay in registers


def latent_attention(
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
    cut: LatentCut,
    *,
    folded: bool = True,
) -> Segments | None:
    """Attention of the listed tiles of queries: q [n, heads, rank + rope] to their lines of out [n, heads, rank].

    Not `folded`: the splits of single queries are returned instead, for the reader to add up.
    contexts [rows] (KV lengths after this step), query_starts, tile_index and tile_offset are int32; `rows` picks
    lines of tables [max_rows, max_blocks].
    """
    num_heads, rank = out.shape[1:]
    rope = q.shape[2] - rank
    tile, splits, segment = cut.tile, cut.splits, cut.segment
    heads = min(MAX_HEADS, triton.next_power_of_2(num_heads))
    dim, rope_dim = padded_dim(rank), padded_dim(rope)
    piece = cut.keys * (dim + rope_dim) * cache.element_size()
    lines, line_bytes = cut.lines, (dim + rope_dim + cut.keys) * q.element_size()
    while lines > cut.min_lines and lines * line_bytes + piece > shared_memory():
        lines //= 2
    tokens = max(1, min(tile, lines // heads))
    lines = max(cut.min_lines, tokens * heads)
    num_segments = cut.num_segments if segment else splits
    parts, numbers = out, out
    listed = tile_index.shape[0] * tile
    if splits:
        parts = torch.empty(listed, num_heads, num_segments, rank, dtype=torch.float32, device=q.device)
        numbers = torch.empty(2, listed, num_heads, num_segments, dtype=torch.float32, device=q.device)
    number_offset = listed * num_heads * num_segments
    shared = {
        "NUM_HEADS": num_heads,
        "RANK": rank,
        "TILE": tile,
        "TOKENS": tokens,
        "SEGMENT": segment,
        "NUM_SEGMENTS": num_segments,
        "SPLITS": splits,
        "DIM": dim,
        "KEYS": cut.keys,
        **launch_options(),
    }
    beside = lines * line_bytes + 2048 * q.element_size()
    programs = tile_index.shape[0] * triton.cdiv(tile, tokens)
    _latent_kernel[(programs, triton.cdiv(num_heads, heads), max(1, splits))](
        q,
        cache,
        tables,
        rows,
        contexts,
        query_starts,
        tile_index,
        tile_offset,
        out,
        parts,
        numbers,
        tables.stride(0),
        cache.stride(1),
        number_offset,
        scale,
        ROPE=rope,
        BLOCK_SIZE=cache.shape[1],
        HEADS=heads,
        LINES=lines,
        ROPE_DIM=rope_dim,
        num_warps=cut.num_warps or (4 if lines <= 16 else 8),
        num_stages=stages_within(cut.num_stages, piece, beside),
        **shared,
    )
    if splits and tile == 1 and not segment:
        if not folded:
            return Segments(parts, numbers, cut.keys, out.dtype)
        _fold_singles(Segments(parts, numbers, cut.keys, out.dtype), contexts, query_starts, tile_index, out)
    elif splits:
        _fold_kernel[(listed, num_heads)](
            parts,
            numbers,
            contexts,
            query_starts,
            tile_index,
            tile_offset,
            out,
            number_offset,
            num_warps=1,
            **shared,
        )
    return None


def _fold_singles(
    segments: Segments, contexts: Tensor, query_starts: Tensor, tile_index: Tensor, out: Tensor
) -> None:
    listed, num_heads, splits, rank = segments.parts.shape
    _fold_single_kernel[(listed, num_heads)](
        segments.parts,
        segments.numbers,
        contexts,
        query_starts,
        tile_index,
        out,
        segments.numbers[0].numel(),
        NUM_HEADS=num_heads,
        RANK=rank,
        SPLITS=splits,
        DIM=padded_dim(rank),
        KEYS=segments.keys,
        num_warps=4 if splits >= 8 else 1,
        **launch_options(),
    )
