"""Bidirectional attention of prompts of which only the first tokens are keys, over keys and values of their step.

Torch's fused kernel cannot be told so: it has computed all prompts of the step over all their tokens, and the results
of these are written over. Keys are taken in tiles at fixed positions, so that a row's bits depend on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import FUSED, kv_stages, padded_dim, shared_memory
from quire.kernels.triton.prefill_attention import QUERY_TILE

_QUERIES, _KEYS = 32, 64


@triton.jit(do_not_specialize=["tile_index_ptr", "tile_offset_ptr", "query_starts_ptr", "attended_ptr"])
def _limited_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    query_starts_ptr,
    attended_ptr,
    tile_index_ptr,  # [tiles] which row of the batch; -1 is padding of a captured step
    tile_offset_ptr,  # [tiles] first query of the tile within its row
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # of each side, with the query itself; 0: none
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    SUB: tl.constexpr = TILE // QUERIES
    place, head = tl.program_id(0), tl.program_id(1)
    index = tl.load(tile_index_ptr + place // SUB)
    if index < 0:
        return
    start = tl.load(query_starts_ptr + index).to(tl.int64)
    count = tl.load(query_starts_ptr + index + 1) - start
    first = tl.load(tile_offset_ptr + place // SUB) + place % SUB * QUERIES
    if first >= count:
        return
    begin, end = 0, tl.load(attended_ptr + index)
    if WINDOW != 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
        end = tl.minimum(end, first + QUERIES - 1 + WINDOW)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    dims = tl.arange(0, DIM)
    in_head = (dims < HEAD_DIM)[None, :]
    positions = first + tl.arange(0, QUERIES)
    inside = (positions < count)[:, None] & in_head
    q_at = (start + positions)[:, None] * q_stride + head * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    to_base_2 = scale * 1.4426950408889634
    for tile in range(begin, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        exists = (keys < end)[:, None] & in_head
        column = kv_head * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + (start + keys)[:, None] * k_stride + column, mask=exists, other=0.0)
        v = tl.load(v_ptr + (start + keys)[:, None] * v_stride + column, mask=exists, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * to_base_2
        seen = (keys < end)[None, :]
        if WINDOW != 0:
            seen = seen & (tl.abs(keys[None, :] - positions[:, None]) < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A query may see none of these keys: exp(-inf - -inf) must not become NaN.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (start + positions)[:, None] * out_stride + head * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


def limited_tiles(counts: list[int], attended: list[int]) -> tuple[list[int], list[int]]:
    """Row and offset of each tile of the prompts that do not attend to all of their tokens."""
    limited = [row for row, (count, seen) in enumerate(zip(counts, attended, strict=True)) if seen < count]
    tiles = [(row, at) for row in limited for at in range(0, counts[row], QUERY_TILE)]
    return [row for row, _ in tiles], [at for _, at in tiles]


def limited_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    attended: Tensor,
    tile_index: Tensor,
    tile_offset: Tensor,
    out: Tensor,
    scale: float,
    window: int,
) -> None:
    """Of the listed tiles of QUERY_TILE queries: q [n, heads, dim] over keys and values [n, KV heads, dim].

    A row's queries see its first attended[row] tokens, and of these with a window (0: none) those less than that far
    away; one that sees no key gets zeros. Into out [n, heads * dim]; lines of all four may lie apart. query_starts,
    attended, tile_index and tile_offset are int32.
    """
    _, num_heads, head_dim = q.shape
    dim = padded_dim(head_dim)
    width = dim * q.element_size()
    keys_at_once = _KEYS if (_QUERIES + 2 * _KEYS) * width < shared_memory() else _KEYS // 4
    _limited_kernel[(tile_index.shape[0] * (QUERY_TILE // _QUERIES), num_heads)](
        q,
        keys,
        values,
        query_starts,
        attended,
        tile_index,
        tile_offset,
        out,
        q.stride(0),
        keys.stride(0),
        values.stride(0),
        out.stride(0),
        scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=keys.shape[1],
        HEAD_DIM=head_dim,
        WINDOW=window,
        TILE=QUERY_TILE,
        QUERIES=_QUERIES,
        KEYS=keys_at_once,
        DIM=dim,
        num_stages=kv_stages(3, keys_at_once, width),
        **FUSED,
    )
