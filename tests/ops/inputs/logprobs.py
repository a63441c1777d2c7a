"""Inputs of the ops in quire/ops/logprobs.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    rows, size = 1 + seed % 6, (1, 130, 5000, 9001)[seed % 4]
    # Few values, so that many are equal.
    logits = torch.randint(-40, 40, (rows, size), generator=generator) * 0.25
    logits[torch.rand(rows, size, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 1.0
    return logits, torch.randint(size, (rows,), generator=generator), (5, 0, 20, 1, 33)[seed % 5]


INPUTS = {"logprobs": generate_inputs}
