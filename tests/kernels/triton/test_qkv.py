"""The fused pass from projected qkv to the cache, against the torch ops it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.rope import split_qkv
from quire.ops.split_k import sum_of
from tests.kernels.device import DEVICE, HALF
from tests.kernels.triton.paged import assert_close, needs_triton

pytestmark = needs_triton
BLOCK, BLOCKS = 16, 5


def rotation_of(tokens: int, rotary_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, 1, rotary_dim // 2, generator=generator) * 6.0
    return torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)


def placed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


@pytest.mark.parametrize(("norm", "keep_keys"), [("", True), ("first", False), ("last", False)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(4, 2, 32, 32), (3, 1, 80, 0), (2, 2, 64, 16), (1, 1, 256, 256), (5, 1, 96, 48)],
)
def test_against_torch(heads: int, kv_heads: int, dim: int, rotary_dim: int, norm: str, keep_keys: bool) -> None:
    from quire.kernels.triton.qkv import prepare_qkv

    tokens, offset = 5, 1.0
    generator = torch.Generator().manual_seed(dim + heads)
    wide = torch.randn(tokens, (heads + 2 * kv_heads) * dim + 3, generator=generator)
    qkv = wide[:, :-3]  # a line may be longer than what belongs to it
    weights = [torch.randn(dim, generator=generator) if norm else None for _ in range(2)]
    rotation = rotation_of(tokens, rotary_dim, generator) if rotary_dim else None
    slots = torch.randperm((BLOCKS - 1) * BLOCK, generator=generator)[:tokens] + BLOCK
    slots[1] = BLOCK - 1  # in the null block: padding, which is not written
    cache = torch.full((2, BLOCKS, kv_heads, BLOCK, dim), 9.0, device=DEVICE)
    k_out = torch.empty(tokens, kv_heads, dim, device=DEVICE) if keep_keys else None
    query = prepare_qkv(
        wide.to(DEVICE)[:, :-3],
        placed(weights[0]),
        placed(weights[1]),
        1e-6,
        offset,
        None if rotation is None else (rotation[0].to(DEVICE), rotation[1].to(DEVICE)),
        slots.to(DEVICE),
        cache,
        heads,
        qkv.dtype,
        k_out,
        norms_rotated=norm == "last",
    )
    q, k, v = split_qkv(qkv.contiguous(), heads, kv_heads, *weights, 1e-6, offset, rotation, norm == "last")
    assert_close(query, q)
    if k_out is not None:
        assert_close(k_out, k)
    expected = torch.full((2, BLOCKS, kv_heads, BLOCK, dim), 9.0)
    for part, values in enumerate((k, v)):
        expected[part, slots // BLOCK, :, slots % BLOCK] = values
    expected[:, 0] = 9.0
    assert_close(cache, expected)


@pytest.mark.parametrize("tokens", [5, 65, 193])
def test_any_number_of_heads_per_program(tokens: int) -> None:
    """Programs have some of a token's heads, and the last of them fewer."""
    from quire.kernels.triton.qkv import prepare_qkv

    heads, kv_heads, dim = 31, 2, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(2, 2 + tokens // BLOCK, kv_heads, BLOCK, dim, device=DEVICE)
    slots = torch.arange(tokens) + BLOCK
    query = prepare_qkv(qkv.to(DEVICE), None, None, 0.0, 0.0, None, slots.to(DEVICE), cache, heads, qkv.dtype)
    q, k, v = split_qkv(qkv, heads, kv_heads, None, None, 0.0, 0.0, None)
    assert_close(query, q)
    flat = cache.transpose(2, 3).reshape(2, -1, kv_heads, dim)[:, BLOCK : BLOCK + tokens]
    assert_close(flat, torch.stack((k, v)))


@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
def test_parts_are_added_up_first(rotary_dim: int) -> None:
    """To the bit: their sum is rounded as a matmul would be."""
    from quire.kernels.triton.qkv import prepare_qkv

    tokens, heads, kv_heads, dim = 5, 4, 2, 32
    generator = torch.Generator().manual_seed(rotary_dim)
    parts = torch.randn(3, tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(DEVICE)
    weights = [torch.randn(dim, generator=generator).to(DEVICE, HALF) for _ in range(2)]
    cos, sin = rotation_of(tokens, rotary_dim or 2, generator)
    rotation = (cos.to(DEVICE, HALF), sin.to(DEVICE, HALF)) if rotary_dim else None
    slots = torch.arange(BLOCK, BLOCK + tokens, device=DEVICE)
    caches = torch.zeros(2, 2, BLOCKS, kv_heads, BLOCK, dim, dtype=HALF, device=DEVICE)
    queries = [
        prepare_qkv(qkv, *weights, 1e-6, 0.0, rotation, slots, cache, heads, HALF)
        for qkv, cache in zip((parts, sum_of(parts, HALF)), caches, strict=True)
    ]
    assert torch.equal(*queries)
    assert torch.equal(*caches)
    assert caches.count_nonzero()
