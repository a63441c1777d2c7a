"""Prompts of which only the first tokens are keys, against dense attention in float64; others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.attention.bidirectional import both_ways
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import UNTOUCHED, assert_close, int32, needs_triton

pytestmark = needs_triton
LENGTHS, ATTENDED = [40, 9, 1, 200, 32], [3, 9, 1, 70, 31]


def run(spec: AttentionSpec, qkv: Tensor, counts: list[int], attended: list[int], padding: int = 0) -> Tensor:
    from quire.kernels.triton.limited_attention import limited_attention, limited_tiles

    q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    starts = int32([0, *counts]).cumsum(0, dtype=torch.int32)
    tiles = [int32(part + [-1] * padding) for part in limited_tiles(counts, attended)]
    out = torch.full((len(qkv), spec.num_heads * spec.head_dim), UNTOUCHED, dtype=qkv.dtype, device=DEVICE)
    limited_attention(q, k, v, starts, int32(attended), *tiles, out, spec.scale, spec.kernel_window)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(2, 2, 16, None), (4, 2, 24, None), (2, 1, 64, 20)])
def test_against_dense_attention(heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    """With a window some queries see no key: they get zeros."""
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, sliding_window=window, causal=False)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), heads + 2 * kv_heads, dim, generator=generator).to(DEVICE, dtype)
    out = run(spec, qkv, LENGTHS, ATTENDED, padding=2)
    start = 0
    for count, seen in zip(LENGTHS, ATTENDED, strict=True):
        part = slice(start, start + count)
        if seen == count:
            assert (out[part] == UNTOUCHED).all()
        else:
            parts = qkv[part].cpu().split([heads, kv_heads, kv_heads], dim=1)
            tolerance = 2e-5 if dtype == torch.float32 else 2e-2
            assert_close(out[part], both_ways(spec, *parts, seen).float(), tolerance)
            assert torch.equal(run(spec, qkv[part], [count], [seen]), out[part]), "alone"
        start += count
