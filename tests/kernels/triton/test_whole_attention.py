"""Whole prompts over their own keys, against dense attention in float64 and, by bits, against the paged kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionSpec
from tests.attention.test_torch_ref import dense
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import assert_close, int32, needs_triton

pytestmark = needs_triton
BLOCK = 16


def prompt(spec: AttentionSpec, count: int, seed: int = 0) -> Tensor:
    """[count, all heads, dim]: queries, keys and values of one token after the other, as a projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    heads = spec.num_heads + 2 * spec.num_kv_heads
    return torch.randn(count, heads, spec.head_dim, generator=generator).to(DEVICE, HALF)


def parts(spec: AttentionSpec, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    return q.contiguous(), k.contiguous(), v


def whole(spec: AttentionSpec, qkv: Tensor, segment: int, piece: int) -> Tensor:
    from quire.kernels.triton.whole_attention import whole_attention

    q, k, v = parts(spec, qkv)
    out = torch.full((q.shape[0], spec.num_heads * spec.head_dim), torch.nan, device=DEVICE, dtype=HALF)
    whole_attention(q, k, v, out, spec.scale, segment, piece)
    return out


def paged(spec: AttentionSpec, qkv: Tensor, segment: int, piece: int) -> Tensor:
    from quire.kernels.triton.tile_attention import Cut, tile_attention

    q, k, v = parts(spec, qkv)
    count, blocks = q.shape[0], -(-q.shape[0] // BLOCK)
    cache = torch.full((2, blocks * BLOCK, spec.num_kv_heads, spec.head_dim), torch.nan, dtype=HALF, device=DEVICE)
    cache[0, :count], cache[1, :count] = k, v
    cache = cache.unflatten(1, (blocks, BLOCK)).transpose(2, 3).contiguous()
    out = torch.empty(count, spec.num_heads * spec.head_dim, dtype=HALF, device=DEVICE)
    tables = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[None]
    offsets = list(range(0, count, 32))
    where = (torch.zeros(1, dtype=torch.int64, device=DEVICE), int32([count]), int32([0, count]))
    tiles = (int32([0] * len(offsets)), int32(offsets))
    cut = Cut(tile=32, splits=0, segment=segment, lines=64, keys=piece)
    tile_attention(q, cache, tables, *where, *tiles, out, spec.scale, None, 0, cut)
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 64), (2, 2, 128), (1, 1, 16)])
@pytest.mark.parametrize("count", [1, 63, 64, 150])
def test_against_dense_attention(heads: int, kv_heads: int, dim: int, count: int) -> None:
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    qkv = prompt(spec, count)
    expected = dense(spec, *(x.cpu().float() for x in parts(spec, qkv))).float()
    assert_close(whole(spec, qkv, 64, 32), expected, 1e-2)


@pytest.mark.parametrize(("segment", "piece"), [(32, 16), (64, 32), (64, 64), (256, 64)])
def test_the_bits_of_the_paged_kernel(segment: int, piece: int) -> None:
    spec = AttentionSpec(4, 2, 64, 0.125)
    qkv = prompt(spec, 200, seed=segment)
    assert torch.equal(whole(spec, qkv, segment, piece), paged(spec, qkv, segment, piece))


def test_what_lies_beyond_the_prompt_is_not_seen() -> None:
    """The next prompt's keys and values stand right behind."""
    spec = AttentionSpec(2, 1, 32, 0.2)
    qkv = prompt(spec, 100)
    alone = whole(spec, qkv[:70].clone(), 64, 32)
    qkv[70:] = torch.nan
    assert torch.equal(whole(spec, qkv[:70], 64, 32), alone)


def test_heads_that_the_copies_cannot_take() -> None:
    from quire.kernels.triton.whole_attention import whole_fits

    assert [whole_fits(dim, 2) for dim in (64, 80, 128, 256)] == [True, False, True, False]
    assert not whole_fits(64, 4)
