"""The sparse indexer of latent attention: which keys a query attends to."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


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


def select_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    starts: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Of each token the cache slots [n, top_k] int32 of its best keys, by position, and their number [n] int32.

    query [n, heads, dim], weights [n, heads], keys [blocks, block_size, dim] or a view of a wider cache; the rows of
    the batch as in AttentionBatch. Slots that are left over are 0. Padding has one, in the null block.
    """
    slots = query.new_zeros(query.shape[0], top_k, dtype=torch.int32)
    counts, size = torch.ones_like(slots[:, 0]), keys.shape[1]
    for row, (first, end) in enumerate(pairwise(starts.tolist())):
        positions = torch.arange(int(contexts[row]), device=query.device)
        lines = tables[rows[row], positions // size].long() * size + positions % size
        products = query[first:end].float() @ keys[lines // size, lines % size].float().T
        seen = positions[len(positions) - (end - first) :] + 1
        scores = index_scores(products, weights[first:end].float())
        for token, chosen in enumerate(top_keys(scores, positions >= seen[:, None], top_k), first):
            found = lines[chosen]
            slots[token, : len(found)], counts[token] = found.to(torch.int32), len(found)
    return slots, counts


SELECT_KEYS = Op(
    "select_keys",
    select_keys,
    0.0,
    (native("select_keys", "index"), triton("select_keys", "index", (torch.float32,))),
)
