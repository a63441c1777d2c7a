"""Causal attention of a whole prompt over its own keys and values, which lie in order and not in a paged cache.

The arithmetic is that of `tile_attention` with the same segments, to the bit. The keys and values of a tile come as
one copy by the tensor memory unit: no addresses take up registers, and two programs share a multiprocessor, one's
products beside the other's exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import FUSED
from quire.kernels.triton.segments import fold, line_sums, nothing, take_in

_QUERIES = 64
_ALIGNMENT = 16  # bytes, of what the copies begin at


@triton.jit
def _whole_kernel(
    q_ptr,
    keys,  # descriptor of [count, KV heads * dim], tiles of [KEYS, dim]
    values,
    out_ptr,
    count,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Later tiles see more keys: starting with them evens out the end of the launch.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head = tl.program_id(1)
    column = head // (NUM_HEADS // NUM_KV_HEADS) * DIM
    positions = first + tl.arange(0, QUERIES)
    at = (positions.to(tl.int64)[:, None] * NUM_HEADS + head) * DIM + tl.arange(0, DIM)[None, :]
    inside = (positions < count)[:, None]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    highest, totals, acc = nothing(QUERIES, DIM, KEYS)
    whole_highest, _, whole = nothing(QUERIES, DIM, KEYS)
    whole_total = tl.zeros([QUERIES], tl.float32)
    for start in range(0, tl.minimum(first + QUERIES, count), KEYS):
        if start % SEGMENT == 0:
            total = line_sums(totals, QUERIES, KEYS)
            whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, acc)
            highest, totals, acc = nothing(QUERIES, DIM, KEYS)
        k, v = keys.load([start, column]), values.load([start, column])  # zeros beyond the last key
        highest, totals, acc = take_in(
            q, k, v, positions, first, start, highest, totals, acc, scale, 0.0, 0, False, QUERIES, KEYS
        )
    total = line_sums(totals, QUERIES, KEYS)
    whole_highest, whole_total, whole = fold(whole_highest, whole_total, whole, highest, total, acc)
    tl.store(out_ptr + at, (whole / whole_total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def whole_fits(head_dim: int, itemsize: int) -> bool:
    """Whether tiles of such heads can be copied, and two programs find room in a multiprocessor."""
    return itemsize == 2 and head_dim in (16, 32, 64, 128)


def whole_attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float, segment: int, piece: int, num_stages: int = 3
) -> None:
    """q [n, heads, dim] attends over keys and values [n, KV heads, dim] up to itself, into out [n, heads * dim].

    q and out are contiguous; lines of keys and values may lie apart. `segment` and `piece` are the `segment` and
    `keys` of the `Cut` whose results these must equal.
    """
    count, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    _whole_kernel[(triton.cdiv(count, _QUERIES), num_heads)](
        q,
        _tiles(keys, piece),
        _tiles(values, piece),
        out,
        count,
        scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=head_dim,
        SEGMENT=segment,
        QUERIES=_QUERIES,
        KEYS=piece,
        num_warps=4,
        num_stages=num_stages,
        **FUSED,
    )


def _tiles(lines: Tensor, piece: int) -> TensorDescriptor:
    count, num_kv_heads, head_dim = lines.shape
    assert lines.stride()[1:] == (head_dim, 1)
    assert lines.data_ptr() % _ALIGNMENT == 0 == lines.stride(0) * lines.element_size() % _ALIGNMENT
    return TensorDescriptor(lines, [count, num_kv_heads * head_dim], [lines.stride(0), 1], [piece, head_dim])
