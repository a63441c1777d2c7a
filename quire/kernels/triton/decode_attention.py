"""Attention of few queries over the paged cache, each query by itself, its keys split over several programs.

The cache is [2, num_blocks, num_kv_heads, block_size, head_dim]. All query heads that share a KV head are computed
together, so keys and values are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, first_seen, heads_of, kv_stages, launch_options
from quire.kernels.triton.widen import widened

_MIN_QUERIES = 16  # the smallest tile of a matrix unit


@triton.jit(do_not_specialize=["index_ptr", "tokens_ptr", "rows_ptr"])
def _split_kernel(
    q_ptr,
    cache_ptr,
    tables_ptr,
    index_ptr,  # [count] which row of the batch each query belongs to
    tokens_ptr,  # [count] and which token of the step it is
    rows_ptr,
    contexts_ptr,
    query_starts_ptr,
    sinks_ptr,  # [heads] float32, or None
    out_ptr,  # [rows, heads, splits, dim] float32, or the result itself when there is one split
    lse_ptr,  # [rows, heads, splits] float32
    table_stride,
    value_offset,
    scale,
    soft_cap,
    out_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # see first_seen
    HAS_CAP: tl.constexpr,
    SHARED: tl.constexpr,  # a row's keys by several programs
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2) if SHARED else 1  # not a constant, for which all would be compiled anew
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    index = tl.load(index_ptr + place)
    if index < 0:  # padding of a captured step
        return
    token = tl.load(tokens_ptr + place).to(tl.int64)
    # A query sees the row's keys up to its own.
    context = tl.load(contexts_ptr + index) - (tl.load(query_starts_ptr + index + 1) - 1 - token).to(tl.int32)
    row = tl.load(rows_ptr + index).to(tl.int64)
    first = 0
    if WINDOW != 0:
        first = tl.maximum(first_seen(context - 1, WINDOW), 0) // KEYS * KEYS
    tiles = tl.cdiv(context - first, KEYS)
    per_split = tl.cdiv(tiles, splits)
    begin = first + split * per_split * KEYS
    end = tl.minimum(context, begin + per_split * KEYS)

    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    in_group = queries < GROUP
    in_head = dims < HEAD_DIM
    heads = kv_head * GROUP + queries
    q_at = (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=in_group[:, None] & in_head[None, :], other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        visible = keys < end
        if WINDOW != 0:
            visible = visible & (keys >= first_seen(context - 1, WINDOW))
        block = tl.load(tables_ptr + row * table_stride + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
        cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        at = cell[:, None] + dims[None, :]
        mask = visible[:, None] & in_head[None, :]  # what is not seen is not read: it may be anything
        k = widened(tl.load(cache_ptr + at, mask=mask, other=0.0), q.dtype)
        v = widened(tl.load(cache_ptr + value_offset + at, mask=mask, other=0.0), q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A tile may be wholly outside the window: exp(-inf - -inf) must not become NaN.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    if sinks_ptr is not None and not SHARED:
        total += tl.exp(tl.load(sinks_ptr + heads, mask=in_group, other=0.0) - highest)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not SHARED:
        result *= out_scale
    # Parts lie by place in this launch; the result of a single split goes straight to its token.
    line = place.to(tl.int64) if SHARED else token
    split_at = (line * NUM_HEADS + heads) * splits + split
    out_mask = in_group[:, None] & in_head[None, :]
    tl.store(
        out_ptr + split_at[:, None] * HEAD_DIM + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask
    )
    if SHARED:
        lse = tl.where(total == 0.0, float("-inf"), highest + tl.log(total))
        tl.store(lse_ptr + split_at, lse, mask=in_group)


@triton.jit(do_not_specialize=["index_ptr", "tokens_ptr"])
def _combine_kernel(
    parts_ptr,
    lse_ptr,
    index_ptr,
    tokens_ptr,
    sinks_ptr,
    out_ptr,
    out_scale,
    NUM_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = place * NUM_HEADS + head
    if tl.load(index_ptr + place) < 0:
        return
    token = tl.load(tokens_ptr + place).to(tl.int64)
    splits = tl.arange(0, PADDED)
    dims = tl.arange(0, DIM)
    lse = tl.load(lse_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    weights = tl.exp(lse - highest)
    total = tl.sum(weights, axis=0)
    if sinks_ptr is not None:
        total += tl.exp(tl.load(sinks_ptr + head) - highest)
    mask = (splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + (at * SPLITS + splits[:, None]) * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / total * out_scale
    out_at = (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    index: Tensor,
    tokens: Tensor,
    rows: Tensor,
    contexts: Tensor,
    query_starts: Tensor,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    window: int,
    splits: int,
    keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    sinks: Tensor | None = None,
    out_scale: float = 1.0,
) -> None:
    """Attention of the queries tokens[i] (int32), which belong to rows index[i] of the batch; -1 is padding.

    q [tokens, heads, dim]; tables [max_rows, max_blocks] int32, whose line rows[i] belongs to row i of the batch;
    contexts [rows] int32: the rows' KV lengths after this step; query_starts [rows + 1] int32. Writes those tokens'
    lines of out [tokens, heads * dim]. sinks [heads] float32: see AttentionSpec. The result is
    multiplied by out_scale.
    """
    _, num_heads, head_dim = q.shape
    count, num_kv_heads = index.shape[0], cache.shape[2]
    heads = heads_of(q, cache, soft_cap, window)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(count, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(count, num_heads, splits, dtype=torch.float32, device=q.device)
    _split_kernel[(count, num_kv_heads, splits)](
        q,
        cache,
        tables,
        index,
        tokens,
        rows,
        contexts,
        query_starts,
        sinks,
        parts,
        lse,
        tables.stride(0),
        cache.stride(0),
        scale,
        soft_cap or 0.0,
        out_scale,
        SHARED=splits > 1,
        QUERIES=max(_MIN_QUERIES, triton.next_power_of_2(num_heads // num_kv_heads)),
        KEYS=keys,
        num_warps=num_warps,
        num_stages=kv_stages(num_stages, keys, heads["DIM"] * q.element_size()),
        **heads,
        **launch_options(),
    )
    if splits > 1:
        _combine_kernel[(count, num_heads)](
            parts,
            lse,
            index,
            tokens,
            sinks,
            out,
            out_scale,
            NUM_HEADS=num_heads,
            SPLITS=splits,
            HEAD_DIM=head_dim,
            DIM=heads["DIM"],
            PADDED=triton.next_power_of_2(splits),
            num_warps=1,
            **launch_options(),
        )
