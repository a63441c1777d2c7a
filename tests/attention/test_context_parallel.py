"""Ranks that split the tokens of a context attend like one rank that keeps them all, whatever the batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, LayerCache, make_batch
from quire.attention.cpu_native import NativeAttention
from quire.attention.latent import LatentWeights
from quire.attention.native_latent import NativeLatentAttention, NativeSparseAttention
from quire.attention.torch_ref import TorchAttention
from quire.parallel.groups import ContextShare, ParallelGroup
from quire.types.errors import ConfigError
from tests.kernels.cpu.isa import needs_library
from tests.models.test_tensor_parallel import ThreadCollectives

pytestmark = needs_library
HEADS, DIM, BLOCK, LENGTH = 2, 16, 16, 150  # heads of each rank
NOPE, ROPE = 12, 8
CHUNKS: dict[str, list[int]] = {"at once": [150], "chunks": [37, 1, 1, 70, 41], "decode": [140, *[1] * 10]}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 20},
    "chunked": {"sliding_window": 48, "chunked": True},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {},
}


def spec_of(kind: str, heads: int, first: int = 0) -> AttentionSpec:
    sinks = torch.linspace(-1, 2, 8)[first : first + heads].clone() if kind == "sinks" else None
    return AttentionSpec(heads, 1, DIM, DIM**-0.5, sinks=sinks, **KINDS[kind])


def by_ranks(ranks: int, run: Any) -> list[Tensor]:
    """run(share) on threads, which are ranks."""
    barrier, shared = threading.Barrier(ranks), [torch.empty(0)] * ranks
    shares = [ContextShare(rank, ranks, ThreadCollectives(rank, barrier, shared)) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, shares))


def feed(backend: NativeAttention, spec: AttentionSpec, cache: Tensor, qkv: Tensor, chunks: list[int]) -> Tensor:
    """The sequence beside another one, whose blocks lie between its own."""
    blocks = -(-LENGTH // BLOCK)
    tables = torch.stack([1 + 2 * torch.arange(blocks), 2 + 2 * torch.arange(blocks)]).int()
    found, done = [], 0
    for count in chunks:
        positions = torch.arange(done, done + count)
        slots = torch.cat([table[positions // BLOCK].long() * BLOCK + positions % BLOCK for table in tables])
        batch = make_batch([count, count], [done + count] * 2, tables, slots, BLOCK)
        at = LayerCache(spec, cache, backend.prepare_eager(batch))
        rows = qkv[done : done + count]
        written = backend.write(at, torch.cat([rows, rows * 0.5]), None, None)
        found.append(backend.attend(at, written)[:count])
        done += count
    return torch.cat(found)


def heads_of(kind: str, ranks: int, chunks: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[LENGTH, ranks * HEADS * DIM] of `ranks` that split the context."""
    generator = torch.Generator().manual_seed(4)
    total = 4 * HEADS
    qkv = torch.randn(LENGTH, (total + 2) * DIM, generator=generator)
    query, key_value = qkv[:, : total * DIM], qkv[:, total * DIM :]

    def run(share: ContextShare) -> Tensor:
        backend, heads = NativeAttention(), total // share.size
        if share.size > 1:
            backend.share_context(share)
        cache = torch.zeros(backend.cache_shape(24, BLOCK, 1, DIM, dtype), dtype=dtype)
        mine = torch.cat([query.view(LENGTH, share.size, -1)[:, share.rank], key_value], dim=1).contiguous()
        return feed(backend, spec_of(kind, heads, share.rank * heads), cache, mine, chunks)

    return torch.cat(by_ranks(ranks, run), dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_attend_like_one(kind: str, ranks: int) -> None:
    """Up to the rounding of sums that are merged in another order; and the batch changes no bit."""
    one, split = heads_of(kind, 1, CHUNKS["at once"]), heads_of(kind, ranks, CHUNKS["at once"])
    torch.testing.assert_close(split, one, atol=2e-6, rtol=2e-6)
    for chunks in (CHUNKS["chunks"], CHUNKS["decode"]):
        assert torch.equal(heads_of(kind, ranks, chunks), split)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_caches_of_other_types(dtype: torch.dtype) -> None:
    chunks = CHUNKS["chunks"]
    torch.testing.assert_close(
        heads_of("full", 2, chunks, dtype), heads_of("full", 1, chunks, dtype), atol=2e-6, rtol=2e-6
    )


def test_a_block_takes_a_part_of_the_memory_on_each_rank() -> None:
    backend = NativeAttention()
    whole = backend.cache_shape(10, BLOCK, 1, DIM)
    backend.share_context(ContextShare(1, 4))
    assert backend.cache_shape(40, BLOCK, 1, DIM) == (2, 40, 1, BLOCK // 4, DIM)
    assert torch.Size(whole).numel() == torch.Size(backend.cache_shape(40, BLOCK, 1, DIM)).numel()


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_latents_are_split_too(chunks: list[int]) -> None:
    generator = torch.Generator().manual_seed(9)
    total, rank, width, value = 4, 32, 32 + ROPE, 16
    q = torch.randn(LENGTH, total, NOPE + ROPE, generator=generator)
    latent = torch.randn(LENGTH, width, generator=generator)
    key_up, value_up = torch.randn(total, NOPE, rank, generator=generator), torch.randn(total, rank, value)

    def run(share: ContextShare) -> Tensor:
        backend, heads = NativeLatentAttention(), total // share.size
        if share.size > 1:
            backend.share_context(share)
        part = slice(share.rank * heads, (share.rank + 1) * heads)
        weights = LatentWeights(torch.ones(rank), 1e-6, key_up[part].contiguous(), value_up[part].contiguous())
        spec = AttentionSpec(heads, 1, width, 0.2, value_dim=rank)
        cache = torch.zeros(backend.cache_shape(12, BLOCK, 1, width))
        tables, found, done = (1 + torch.arange(10)).int().unsqueeze(0), [], 0
        for count in chunks:
            positions = torch.arange(done, done + count)
            slots = tables[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
            metadata = backend.prepare_eager(make_batch([count], [done + count], tables, slots, BLOCK))
            rows, at = slice(done, done + count), LayerCache(spec, cache, metadata)
            mine = q[rows, part].contiguous(), latent[rows].contiguous()
            found.append(backend.attend_latent(at, weights, backend.write_latent(at, weights, *mine, None)))
            done += count
        return torch.cat(found)

    one, split = by_ranks(1, run)[0], torch.cat(by_ranks(4, run), dim=1)
    torch.testing.assert_close(split, one, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("backend", [TorchAttention, NativeSparseAttention])
def test_backends_that_keep_every_token_refuse(backend: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"decode_context_parallel_size is 2, but .* keeps every token on each rank"
    ):
        backend().share_context(ContextShare(0, 2))


@pytest.mark.parametrize(("kv_heads", "sharing"), [(8, 1), (2, 2), (4, 1)])
def test_more_ranks_than_hold_a_head_are_refused(kv_heads: int, sharing: int) -> None:
    group = ParallelGroup(0, 4, context=ContextShare(0, 4))
    message = rf"is 4, but with {kv_heads} KV heads on 4 ranks a head is held by {sharing};"
    with pytest.raises(ConfigError, match=message):
        group.check_context(kv_heads)
    group.check_context(1)
