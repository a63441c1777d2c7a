"""Inputs of the ops in quire/ops/sample.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, size = 1 + seed % 5, (1, 130, 9001, 20000)[seed % 4]
    # Few values, so that many are equal and the cut falls among them.
    logits = torch.randint(-40, 40, (rows, size), generator=generator) * 0.25
    probabilities = logits.softmax(-1)
    logits[torch.rand(rows, size, generator=generator) < 0.1] = -torch.inf
    return logits, probabilities, torch.rand(rows, generator=generator, dtype=torch.float64)


INPUTS = {"keep_top_p": generate_inputs}
