"""The sparse indexer of latent attention: which keys a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(products: Tensor, weights: Tensor) -> Tensor:
    """products [..., heads, keys] of index queries and keys, weights [..., heads] -> scores [..., keys] float32.

    Heads are added from the first to the last.
    """
    total = products[..., 0, :].float().clamp(min=0.0) * weights[..., 0, None]
    for head in range(1, products.shape[-2]):
        total = total + products[..., head, :].float().clamp(min=0.0) * weights[..., head, None]
    return total


def top_keys(scores: Tensor, hidden: Tensor, top_k: int) -> Tensor:
    """Which of the keys [..., keys] are the best `top_k` of those not hidden; of equals, the lower positions.

    All that are not hidden, where there are no more.
    """
    if scores.shape[-1] <= top_k:
        return ~hidden
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    return torch.zeros_like(hidden).scatter_(-1, order, True) & ~hidden
