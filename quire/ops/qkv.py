"""From projected qkv to heads: per-head norm and rotation of queries and keys, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.norm import rms_norm
from quire.ops.rope import apply_rope


def split_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    norms_rotated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [n, num_heads, dim], k, v [n, num_kv_heads, dim]) of qkv [n, (num_heads + 2 * num_kv_heads) * dim].

    Query and key heads stay together until both are rotated: half as many small ops.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if rotation is not None and norms_rotated:
        qk, rotation = apply_rope(qk, *rotation), None
    if q_weight is not None and k_weight is not None:
        q = rms_norm(qk[:, :num_heads], q_weight, eps, weight_offset)
        qk = torch.cat((q, rms_norm(qk[:, num_heads:], k_weight, eps, weight_offset)), dim=1)
    if rotation is not None:
        qk = apply_rope(qk, *rotation)
    return qk[:, :num_heads], qk[:, num_heads:], v
