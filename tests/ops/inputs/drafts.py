"""Inputs of the ops in quire/ops/step.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    count, scratch = 1 + seed % 7, 8
    rows = torch.randperm(scratch, generator=generator)[:count]
    num_computed = torch.randint(0, 20, (scratch + 1,), generator=generator)
    num_tokens = num_computed + torch.randint(1, 4, num_computed.shape, generator=generator)
    num_tokens[scratch] = num_computed[scratch] = 0
    num_drafts = torch.randint(1, 5, rows.shape, generator=generator)
    counts = (num_tokens - num_computed)[rows] + num_drafts
    late = torch.randint(1, 3, rows.shape, generator=generator)  # how far the bounds are off
    contexts = (num_computed[rows] + counts + late).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    ahead = torch.cat([torch.arange(1 + each) for each in num_drafts.tolist()]).int()
    lines = torch.arange(count).repeat_interleave(1 + num_drafts)
    sample_contexts = (contexts - num_drafts)[lines].int() + ahead
    drafts = torch.where(ahead > 0, torch.randint(1 << 17, ahead.shape, generator=generator), -1).int()
    padded = (torch.tensor([scratch]), torch.zeros(1).int(), torch.full((1,), -1).int(), torch.ones(1).int())
    samples = (torch.cat(pair) for pair in zip((rows[lines], ahead, drafts, sample_contexts), padded, strict=True))
    rows, contexts = torch.cat([rows, padded[0]]), torch.cat([contexts, padded[3]])
    token_ids = torch.zeros(scratch + 1, 40, dtype=torch.int32)
    return rows, torch.cat([starts, starts[-1:]]), contexts, *samples, token_ids, num_tokens, num_computed


def generate_logits(seed: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    width, size = 1 + 3 * seed % 17, 20 + seed
    tokens = torch.randperm(size, generator=generator)[:width].sort().values
    return torch.randn(1 + seed % 5, width, generator=generator), tokens - torch.arange(width), size


INPUTS = {"place_drafts": generate_inputs, "spread_logits": generate_logits}
