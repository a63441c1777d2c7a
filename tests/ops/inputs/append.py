"""Inputs of the ops in quire/ops/step.py."""

from __future__ import annotations

import torch
from torch import Tensor


def _rows(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor, Tensor, int, Tensor | None]:
    """Every third time rows with drafts behind their tokens."""
    generator = torch.Generator().manual_seed(seed)
    count, scratch = 1 + seed % 7, 8
    rows = torch.randperm(scratch, generator=generator)[:count]
    rows[1:2] = scratch
    lengths = torch.randint(1, 20, (scratch + 1,), generator=generator)
    token_ids = torch.zeros(scratch + 1, 32, dtype=torch.int32)
    ahead = None
    if seed % 3 == 2:
        counts = torch.randint(1, 5, rows.shape, generator=generator)
        counts[rows == scratch] = 1
        ahead = torch.cat([torch.arange(each) for each in counts.tolist()]).int()
        rows = rows.repeat_interleave(counts)
        token_ids = torch.randint(1, 3, token_ids.shape, generator=generator).int()
    return generator, rows, token_ids, lengths, lengths - 2, scratch, ahead


def generate_append(seed: int) -> tuple[Tensor | int | None, ...]:
    generator, rows, room, lengths, computed, scratch, ahead = _rows(seed)
    tokens = torch.randint(1, 1 << 17 if ahead is None else 4, rows.shape, generator=generator).int()
    values = torch.tensor([1.5, -3.0, torch.inf, -torch.inf])
    highest = values[torch.randint(4, rows.shape, generator=generator)]
    raw = values[torch.randint(4, (len(rows), 3), generator=generator)] if seed % 2 else None
    return tokens, highest, rows, room, lengths, computed, scratch, raw, ahead


def generate_greedy(seed: int) -> tuple[Tensor | int | None, ...]:
    generator, rows, room, lengths, computed, scratch, ahead = _rows(seed)
    size = (130, 3, 5000, 9001, 20000)[seed % 5]
    logits = torch.randint(1, 20, (len(rows), size), generator=generator).float()
    if ahead is not None:
        logits[torch.arange(len(rows)), torch.randint(1, 3, rows.shape, generator=generator)] = 30.0
    return logits, rows, room, lengths, computed, scratch, ahead


INPUTS = {"append_tokens": generate_append, "append_greedy": generate_greedy}
