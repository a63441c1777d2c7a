"""Inputs of the ops in quire/ops/candidates.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.candidates import SampledRows, offer_candidates
from tests.ops.inputs.sample_within import generate_inputs


def _rows(seed: int) -> tuple[Tensor, SampledRows | None]:
    """Rows whose limits offers can keep; every third time all are greedy."""
    logits, parameters, *keys = generate_inputs(seed)
    unlimited = parameters[2] == 0.0
    parameters[1, unlimited], parameters[3, unlimited] = -torch.inf, 1.0
    parameters[2].clamp_(max=20.0)
    return logits, None if seed % 3 == 2 else (parameters, keys[0], keys[1])


def generate_offer(seed: int) -> tuple[Tensor, int, int, SampledRows | None]:
    logits, sampled = _rows(seed)
    return logits, seed % 5 * 333, 1 if sampled is None else 32, sampled


def generate_among(seed: int) -> tuple[Tensor, int, SampledRows | None]:
    logits, sampled = _rows(seed)
    ranks = min(1 + seed % 4, logits.shape[1])
    slices = logits.tensor_split(ranks, dim=1)
    starts = [sum(part.shape[1] for part in slices[:rank]) for rank in range(ranks)]
    count = 1 if sampled is None else 32
    offers = [offer_candidates(part, start, count, sampled) for part, start in zip(slices, starts, strict=True)]
    return torch.cat(offers, dim=1), ranks, sampled


INPUTS = {"offer_candidates": generate_offer, "sample_among": generate_among}
