"""Inputs of the ops in quire/ops/sample.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, size = 1 + seed % 6, (1, 130, 5000, 9001)[seed % 4]
    # Few values, so that many are equal and cuts fall among them.
    logits = torch.randint(-40, 40, (rows, size), generator=generator) * 0.25

    def some(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (rows,), generator=generator)]

    parameters = torch.stack(
        [
            some([0.0, 0.7, 1.0, 1.9]),
            some([-torch.inf, -torch.inf, -0.5, -3.0]),
            some([0.0, 1.0, 5.0, 20.0, 1e6]),
            some([1.0, 1.0, 0.05, 0.5, 0.95]),
        ]
    )
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return logits, parameters, seeds, torch.randint(0, 2**40, (rows,), generator=generator)


INPUTS = {"sample_within": generate_inputs}
