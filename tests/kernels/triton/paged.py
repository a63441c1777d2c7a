"""Rows with scattered KV blocks, in which everything that no query may see is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.attention.test_torch_ref import dense
from tests.kernels.device import DEVICE, HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

BLOCK = 16
SINKS = torch.tensor([-1.0, 0.5, 3.0, 120.0])  # the last is more than all keys together
UNTOUCHED = 123.0


@dataclass(frozen=True)
class Paged:
    """`queries[i]` tokens of row i are new; its context is `contexts[i]` with them."""

    query: Tensor  # [sum(queries), heads, dim]
    cache: Tensor  # [2, num_blocks, kv_heads, block_size, dim]
    tables: Tensor  # [max_rows, max_blocks] int32
    rows: Tensor  # [num_rows] int64
    contexts: Tensor  # [num_rows] int32
    query_starts: Tensor  # [num_rows + 1] int32
    expected: Tensor  # [sum(queries), heads * dim]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_paged(spec: AttentionSpec, queries: list[int], contexts: list[int], seed: int = 0) -> Paged:
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-n // BLOCK) for n in contexts]
    order = 1 + torch.randperm(sum(blocks), generator=generator)
    cache = torch.full((2, 1 + sum(blocks), spec.num_kv_heads, BLOCK, spec.head_dim), float("nan"))
    # More lines than rows, in another order, full of blocks that are not there.
    tables = torch.full((2 * len(queries), max(blocks) + 2), 1 << 30, dtype=torch.int32)
    rows = torch.randperm(2 * len(queries), generator=generator)[: len(queries)]
    new, expected, used = [], [], 0
    for row, count, context, num_blocks in zip(rows.tolist(), queries, contexts, blocks, strict=True):
        tables[row, :num_blocks] = order[used : used + num_blocks].int()
        used += num_blocks
        shape = (context, spec.num_kv_heads, spec.head_dim)
        q = torch.randn(context, spec.num_heads, spec.head_dim, generator=generator)
        k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        first_seen = int(spec.first_seen(torch.tensor(context - count)))
        at = torch.arange(first_seen, context)
        for part, values in enumerate((k, v)):
            cache[part, tables[row, at // BLOCK].long(), :, at % BLOCK] = values[first_seen:]
        new.append(q[context - count :])
        expected.append(dense(spec, q, k, v)[context - count :].float())
    starts = [sum(queries[:index]) for index in range(len(queries) + 1)]
    return Paged(
        query=torch.cat(new).to(DEVICE),
        cache=cache.to(DEVICE),
        tables=tables.to(DEVICE),
        rows=rows.to(DEVICE),
        contexts=int32(contexts),
        query_starts=int32(starts),
        expected=torch.cat(expected),
    )


def seeing(spec: AttentionSpec, window: int | None) -> AttentionSpec:
    """A spec with a sliding window or, of a negative number, chunks of so many tokens."""
    return replace(spec, sliding_window=window and abs(window), chunked=(window or 0) < 0)


def sinks_of(spec: AttentionSpec) -> Tensor | None:
    return None if spec.sinks is None else spec.sinks.to(DEVICE)


def tiles_of(queries: list[int], tile: int = 16) -> list[tuple[int, int]]:
    """(row, first query) of each tile."""
    return [(row, start) for row, count in enumerate(queries) for start in range(0, count, tile)]


def attend(kernel: Callable[..., None], spec: AttentionSpec, paged: Paged, tiles: list[tuple[int, int]]) -> Tensor:
    """What a kernel for listed tiles of queries writes, among lines of UNTOUCHED."""
    out = torch.full((paged.query.shape[0], spec.num_heads * spec.head_dim), UNTOUCHED, device=DEVICE)
    out = out.to(paged.query.dtype)
    rows = (paged.tables, paged.rows, paged.contexts, paged.query_starts)
    listed = (int32([row for row, _ in tiles]), int32([offset for _, offset in tiles]))
    given = (paged.query, paged.cache, *rows, *listed, out, spec.scale, spec.soft_cap, spec.kernel_window)
    kernel(*given, sinks=sinks_of(spec))
    return out


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.cpu().float(), expected, atol=tolerance, rtol=tolerance)
