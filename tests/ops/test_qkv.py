"""From projected qkv to heads."""

from __future__ import annotations

import torch

from quire.ops.norm import rms_norm
from quire.ops.rope import apply_rope, split_qkv

GENERATOR = torch.Generator().manual_seed(0)
HEADS, KV_HEADS, DIM, TOKENS = 6, 2, 8, 5
QKV = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, generator=GENERATOR)
Q, K, V = (part.unflatten(-1, (-1, DIM)) for part in QKV.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1))


def test_heads_are_cut_in_order() -> None:
    for mine, expected in zip(split_qkv(QKV, HEADS, KV_HEADS, None, None, 0.0, 0.0, None), (Q, K, V), strict=True):
        assert torch.equal(mine, expected)


def test_queries_and_keys_are_normed_and_then_rotated() -> None:
    q_weight, k_weight = torch.randn(2, DIM, generator=GENERATOR)
    angles = torch.rand(TOKENS, 1, DIM // 2, generator=GENERATOR)
    rotation = (torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1))
    q, k, v = split_qkv(QKV, HEADS, KV_HEADS, q_weight, k_weight, 1e-6, 1.0, rotation)
    torch.testing.assert_close(q, apply_rope(rms_norm(Q, q_weight, 1e-6, 1.0), *rotation))
    torch.testing.assert_close(k, apply_rope(rms_norm(K, k_weight, 1e-6, 1.0), *rotation))
    assert torch.equal(v, V)
