"""Bidirectional attention of one prompt in float64: what kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec


def both_ways(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, attended: int) -> Tensor:
    """[n, heads * dim], where the first `attended` tokens are keys; zeros of a query that sees none of them."""
    n = q.shape[0]
    k, v = (x.double().repeat_interleave(spec.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
    at = torch.arange(n)
    hidden = (at >= attended).expand(n, n).clone()
    if spec.sliding_window is not None:
        hidden |= (at[:, None] - at).abs() >= spec.sliding_window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
