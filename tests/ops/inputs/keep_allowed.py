"""Inputs of the ops in quire/ops/shaping.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(seed)
    count, vocab_size, max_rows = 1 + seed % 6, (1, 130, 5000, 9001)[seed % 4], 9
    logits = torch.randn(count, vocab_size, generator=generator)
    rows = torch.randperm(max_rows, generator=generator)[:count]
    masks = torch.randint(-(2**31), 2**31 - 1, (10, -(-vocab_size // 32)), generator=generator, dtype=torch.int64)
    lines = torch.randint(-1, 7, (1 + seed % 2, max_rows), generator=generator, dtype=torch.int32)
    ahead = torch.randint(4, rows.shape, generator=generator).int() if seed % 3 == 1 else None
    return logits, rows, masks.to(torch.int32), lines, ahead


INPUTS = {"keep_allowed": generate_inputs}
