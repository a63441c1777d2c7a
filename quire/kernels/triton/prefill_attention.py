"""Causal attention of many queries per row over the paged cache: prefill, with or without a cached prefix.

The cache is [2, num_blocks, num_kv_heads, block_size, head_dim] and already holds the queries' own keys. Work is
cut into tiles of QUERIES queries of one row; the caller lists them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import FUSED, heads_of, shared_memory

QUERY_TILE = 128
_WIDE = 256  # bytes of a head
_MIN_KEYS = 16
_BESIDE = 16 << 10  # bytes, beside keys and values


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
    out_ptr,
    table_stride,
    value_offset,
    scale,
    soft_cap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Later tiles see more keys: starting with them evens out the end of the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    index = tl.load(tile_index_ptr + tile)
    if index < 0:  # padding of a recorded step
        return
    offset = tl.load(tile_offset_ptr + tile)
    query_start = tl.load(query_starts_ptr + index)
    count = tl.load(query_starts_ptr + index + 1) - query_start
    context = tl.load(contexts_ptr + index)
    row = tl.load(rows_ptr + index).to(tl.int64)
    first_position = context - count + offset
    queries = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    in_row = offset + queries < count
    positions = first_position + queries
    token = (query_start + offset + queries).to(tl.int64)
    at = (token[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    q_mask = in_row[:, None] & in_head[None, :]
    q = tl.load(q_ptr + at, mask=q_mask, other=0.0)
    # Scaled queries would have to be loaded anew for every product, and each matrix instruction wait for the last.
    to_base_2 = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    end = tl.minimum(context, first_position + QUERIES)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        exists = keys < end
        if WINDOW > 0:
            exists = exists & (keys > first_position - WINDOW)  # blocks that no query sees may hold anything
        block = tl.load(tables_ptr + row * table_stride + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        k_at = cell[:, None] + dims[None, :]
        kv_mask = exists[:, None] & in_head[None, :]
        k = tl.load(cache_ptr + k_at, mask=kv_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            scores = scores * scale
            scores = soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)
        if start + KEYS > first_position:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(keys[None, :] > positions[:, None] - WINDOW, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * to_base_2)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * to_base_2 - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        v = tl.load(cache_ptr + value_offset + k_at, mask=kv_mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = new_highest
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=q_mask)


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
    window: int | None,
    query_tile: int = QUERY_TILE,
    keys: int = 128,
) -> None:
    """Attention of the listed tiles of queries: q [n, heads, dim] to their lines of out [n, heads * dim].

    contexts, query_starts, tile_index and tile_offset are int32; `rows` picks lines of tables [max_rows, max_blocks].
    """
    heads = heads_of(q, cache, soft_cap, window)
    width, num_stages = heads["DIM"] * q.element_size(), 2
    if width > _WIDE:  # fewer keys at a time, for a multiprocessor to have room for them
        keys, num_stages = (min(keys, 64), 2) if width <= 2 * _WIDE else (min(keys, 32), 1)
    beside = query_tile * width + _BESIDE // 2 if width > _WIDE else _BESIDE  # wide queries stay there, too
    while keys > _MIN_KEYS and 2 * num_stages * keys * width + beside > shared_memory():
        keys //= 2
    _prefill_kernel[(tile_index.shape[0], q.shape[1])](
        q,
        cache,
        tables,
        rows,
        contexts,
        query_starts,
        tile_index,
        tile_offset,
        out,
        tables.stride(0),
        cache.stride(0),
        scale,
        soft_cap or 0.0,
        QUERIES=query_tile,
        KEYS=keys,
        num_warps=8,
        num_stages=num_stages,
        **heads,
        **FUSED,
    )
