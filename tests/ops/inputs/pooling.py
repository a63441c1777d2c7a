"""Inputs of the ops in quire/ops/encoder.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops.encoder import TILE


def generate_prompts(seed: int) -> tuple[Tensor, list[int], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 3 * TILE, (1 + seed % 4,), generator=generator).tolist()
    starts = np.concatenate(([seed % 3], np.cumsum(counts)[:-1] + seed % 3)).tolist()
    return torch.randn(sum(counts) + 5, 1 + 9 * seed, generator=generator), starts, counts


INPUTS = {"prompt_sums": generate_prompts}
