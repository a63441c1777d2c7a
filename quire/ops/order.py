"""The one order of tokens that all of sampling uses: higher logit first, and among equals the lower token id.

Every function here gives a row the same result in whatever batch it stands, and leaves nothing to how a device
breaks ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 17  # tokens at a time in a radix select: its int64 temporaries should stay in a core's cache


def top_k_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens in order: values and token ids, both [m, count]."""
    size = logits.shape[1]
    # Value and id make one integer, so no two are equal and topk has nothing to decide.
    reverse_ids = torch.arange(size - 1, -1, -1, device=logits.device)
    keys = ((_sortable(logits).to(torch.int64) << 32) | reverse_ids).topk(count, dim=1).values
    token_ids = (size - 1) - (keys & 0xFFFFFFFF)
    return logits.gather(1, token_ids), token_ids


def keep_prefix(logits: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """Which tokens are in the shortest prefix of the order whose weights add up to `needed`: bool [m, n].

    Weights [m, n] and needed [m] are int64, so sums are exact in any order of addition. A radix select: three
    passes over the digits of the sort key find the last kept value, a running sum cuts among its equals. It is
    faster than sorting a vocabulary, and indifferent to ties.
    """
    lines = max(1, _CHUNK // logits.shape[1])
    parts = zip(torch.split(logits, lines), torch.split(weights, lines), torch.split(needed, lines), strict=True)
    return torch.cat([_keep_prefix(*part) for part in parts])


def _keep_prefix(logits: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    ranks = 0x7FFFFFFF - _sortable(logits).to(torch.int64)  # [0, 2^32), smaller is earlier
    needed = needed.unsqueeze(1)
    last = torch.zeros_like(needed)
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        digits = (ranks >> shift) & ((1 << bits) - 1)
        mass = torch.zeros(len(logits), 1 << bits, dtype=torch.int64, device=logits.device)
        mass.scatter_add_(1, digits, weights)
        total = mass.cumsum(1)
        digit = torch.searchsorted(total, needed).clamp_(max=(1 << bits) - 1)
        needed = needed - (total.gather(1, digit) - mass.gather(1, digit))
        weights = weights * (digits == digit)
        last |= digit << shift
    before = weights.cumsum(1) - weights
    return (ranks < last) | ((ranks == last) & (before < needed))


def _sortable(values: Tensor) -> Tensor:
    """float32 as int32 in the same order; -0.0 and 0.0 are equal."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
