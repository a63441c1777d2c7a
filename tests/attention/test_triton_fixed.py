"""The backend whose bits never change: prompts at once, in chunks and beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, HeadNorm, LayerCache, make_batch
from tests.attention.test_torch_ref import dense
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import SINKS, needs_triton

pytestmark = needs_triton

BLOCK = 16
LENGTHS = [70, 33, 3]
SPEC = AttentionSpec(2, 1, 16, 0.25)
# Rows and their contexts after each step.
AT_ONCE = [([0, 1, 2], LENGTHS)]
ALONE = [([row], [length]) for row, length in enumerate(LENGTHS)]
IN_CHUNKS = [([0], [40]), ([1, 0, 2], [1, 68, 3]), ([0, 1], [70, 33])]


def outputs(
    plans: list[tuple[list[int], list[int]]],
    spec: AttentionSpec = SPEC,
    dtype: torch.dtype = HALF,
    cache_dtype: torch.dtype | None = None,
    *,
    variants: Sequence[dict[str, Any]] = (),
    **attributes: Any,
) -> list[Tensor]:
    """What each row's tokens get, under steps that take them as `plans` say; `attributes` are the backend's.

    With `variants` of these: what the tokens of the last step get under each.
    """
    from quire.attention.triton_fixed import FixedTritonAttention

    # Short prompts count as long ones, with several segments.
    attributes = {"fused_queries": 33, "min_segment": 32, "keys_at_a_time": 32, "few_splits": 2} | attributes
    backend, generator = type("Small", (FixedTritonAttention,), attributes)(), torch.Generator().manual_seed(0)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    tokens = [torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in LENGTHS]
    weight = torch.randn(spec.head_dim, generator=generator).to(DEVICE, dtype)
    blocks = [-(-n // BLOCK) for n in LENGTHS]
    order = 1 + torch.randperm(sum(blocks), generator=generator)
    tables = torch.zeros(len(LENGTHS), max(blocks) + 1, dtype=torch.int32)
    for row, part in enumerate(order.split(blocks)):
        tables[row, : len(part)] = part.int()
    shape = backend.cache_shape(1 + sum(blocks), BLOCK, spec.num_kv_heads, spec.head_dim)
    cache = torch.zeros(shape, device=DEVICE).to(cache_dtype or dtype)
    done = [0] * len(LENGTHS)
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    for rows, contexts in plans:
        before = [done[row] for row in rows]
        slots = []
        for row, start, context in zip(rows, before, contexts, strict=True):
            at = torch.arange(start, context)
            slots.append(tables[row, at // BLOCK].long() * BLOCK + at % BLOCK)
            done[row] = context
        counts = [context - start for start, context in zip(before, contexts, strict=True)]
        batch = make_batch(counts, contexts, tables[rows].to(DEVICE), torch.cat(slots).to(DEVICE), BLOCK)
        at_step = LayerCache(spec, cache, backend.prepare_eager(batch))
        spans = zip(rows, before, contexts, strict=True)
        qkv = torch.cat([tokens[row][start:context] for row, start, context in spans])
        query = backend.write(at_step, qkv, HeadNorm(weight, weight, 1e-6, 0.0), None)
        if variants:
            if (rows, contexts) == plans[-1]:
                kinds = [type("Variant", (type(backend),), variant)() for variant in variants]
                return [kind.attend(at_step, query) for kind in kinds]
            continue
        for row, part in zip(rows, backend.attend(at_step, query).split(counts), strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found if parts]


@pytest.mark.parametrize(("window", "sinks"), [(None, None), (50, None), (50, SINKS[1:3])])
def test_the_same_bits(window: int | None, sinks: Tensor | None) -> None:
    spec = AttentionSpec(2, 1, 16, 0.25, window, sinks=None if sinks is None else sinks.to(DEVICE))
    for together, alone, in_chunks in zip(*(outputs(x, spec) for x in (AT_ONCE, ALONE, IN_CHUNKS)), strict=True):
        assert torch.equal(alone, together)
        assert torch.equal(in_chunks, together)


def test_the_widest_heads() -> None:
    """A multiprocessor must have room for their tiles; they are the same in chunks as well."""
    spec = AttentionSpec(1, 1, 256, 0.06)
    for together, in_chunks in zip(outputs(AT_ONCE, spec), outputs(IN_CHUNKS, spec), strict=True):
        assert torch.equal(in_chunks, together)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 16), (5, 64), (20, 80), (4, 128), (2, 256)])
def test_the_same_bits_whoever_shares_the_segments(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shares = ((1, 4), (2, 2), (2, 4), (4, 2), (16, 4))
    variants = [{"segment_shares": ((1, share),)} for share in shares]
    found = outputs([([0], [69]), ([0], [70])], AttentionSpec(num_heads, 1, head_dim, 0.1), dtype, variants=variants)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_the_same_bits_from_a_cache_of_another_type() -> None:
    """A prompt's own keys have more digits than those the cache keeps; later steps see only the latter."""
    kind = (SPEC, HALF, torch.float8_e4m3fn)
    for mine, theirs in zip(outputs(ALONE, *kind), outputs(IN_CHUNKS, *kind), strict=True):
        assert torch.equal(mine, theirs)


def test_whole_prompts_have_a_kernel_of_their_own() -> None:
    from quire.kernels.triton.whole_attention import whole_attention

    taken: list[int] = []

    def spy(query: Tensor, *rest: Any) -> None:
        taken.append(query.shape[0])
        whole_attention(query, *rest)

    spied = {"attend_whole": staticmethod(spy)}
    outputs(AT_ONCE, **spied)
    assert taken == [70, 33]
    outputs(ALONE[1:], SPEC, torch.float32, **spied)
    outputs(ALONE[1:], AttentionSpec(2, 1, 16, 0.25, sliding_window=50), **spied)
    assert taken == [70, 33], "neither wide types nor windows"


@pytest.mark.parametrize("sinks", [None, SINKS[1:3]])
def test_against_dense_attention(sinks: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    width = (SPEC.num_heads + 2 * SPEC.num_kv_heads) * SPEC.head_dim
    tokens = [torch.randn(n, width, generator=generator).to(HALF).float() for n in LENGTHS]
    weight = torch.randn(SPEC.head_dim, generator=generator).to(HALF).float()
    placed = replace(SPEC, sinks=None if sinks is None else sinks.to(DEVICE))
    for qkv, mine in zip(tokens, outputs(AT_ONCE, placed), strict=True):
        heads = qkv.unflatten(-1, (-1, SPEC.head_dim))
        q, k, v = heads.split([SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads], dim=1)
        q, k = (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight for x in (q, k))
        torch.testing.assert_close(
            mine.cpu().float(), dense(replace(SPEC, sinks=sinks), q, k, v).float(), atol=3e-2, rtol=3e-2
        )
