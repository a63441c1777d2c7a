"""Sampling on logits that ranks share by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty

_SampledRows = tuple[Tensor, Tensor, Tensor]


def offer_candidates(logits: Tensor, first_token: int, count: int, sampled: _SampledRows | None = None) -> Tensor:
    """See quire/ops/candidates.py."""
    logits = logits.float()
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    (rows, size), keys = logits.shape, _keys(sampled)
    out = empty(rows, 1 + 2 * count)
    sizes = (first_token, count, rows, size, logits.stride(0))
    bound().offer_candidates(logits.data_ptr(), *_pointers(keys), *sizes, out.data_ptr())
    return out


def sample_among(offers: Tensor, ranks: int, sampled: _SampledRows | None = None) -> tuple[Tensor, Tensor]:
    """See quire/ops/candidates.py."""
    offers, keys, rows = offers.contiguous(), _keys(sampled), offers.shape[0]
    tokens, highest = empty(rows, dtype=torch.int32), empty(rows)
    sizes = (ranks, offers.shape[1] // ranks // 2, rows)
    bound().sample_among(offers.data_ptr(), *_pointers(keys), *sizes, tokens.data_ptr(), highest.data_ptr())
    return tokens, highest


def _keys(sampled: _SampledRows | None) -> list[Tensor]:
    return [] if sampled is None else [part.contiguous() for part in sampled]


def _pointers(keys: list[Tensor]) -> list[int | None]:
    return [part.data_ptr() for part in keys] or [None, None, None]
