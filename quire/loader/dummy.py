"""Seeded dummy weights: fills a model's parameters without any checkpoint, for tests, benchmarks and sizing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

AMPLITUDE = 1e-3


@torch.no_grad()
def fill_dummy(named_parameters: Iterable[tuple[str, Tensor]], seed: int = 0) -> None:
    """Fill in place, each parameter from the seed and its own name, so that order and neighbours do not matter.

    Values are uniform in [-AMPLITUDE, AMPLITUDE]; the weights of norms lie that close to 1. The numbers are drawn
    as float32 where the parameter lives: billions of them would take minutes on the host.
    """
    for name, parameter in named_parameters:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        values = torch.empty(parameter.shape, device=parameter.device).uniform_(
            -AMPLITUDE, AMPLITUDE, generator=generator
        )
        if parameter.dim() == 1 and "norm" in name:
            values += 1
        parameter.copy_(values)
