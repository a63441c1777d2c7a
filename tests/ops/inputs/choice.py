"""Inputs of the ops in quire/ops/sample.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, size = 1 + seed % 5, (1, 130, 9001, 20000)[seed % 4]
    # Few values, so that many are equal.
    return (torch.randint(-20, 20, (rows, size), generator=generator).float(),)


def generate_draw_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    (logits,) = generate_inputs(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(logits),), generator=generator)
    return logits * 0.25, seeds, torch.randint(0, 2**40, (len(logits),), generator=generator)


INPUTS = {"first_max": generate_inputs, "draw": generate_draw_inputs}
