"""Inputs of the ops in quire/ops/shaping.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.shaping import ANY, FIXED_COLUMNS

_ROWS, _LENGTH = 7, 40


def _rows(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    size = (33, 90, 5000)[seed % 3]
    count = 1 + seed % 5
    logits = torch.randint(-40, 40, (count, size), generator=generator) * 0.125
    rows = torch.randperm(_ROWS, generator=generator)[:count]
    token_ids = torch.randint(-1, min(size, 40) + 2, (_ROWS, _LENGTH), generator=generator).int()
    num_tokens = torch.randint(2, _LENGTH - 4, (_ROWS,), generator=generator)
    ahead = None
    if seed % 2:
        rows = rows[torch.arange(count) // 2]
        ahead = torch.randint(4, rows.shape, generator=generator).int()
    return generator, logits, rows, token_ids, num_tokens, num_tokens // 2, ahead


def generate_edits(seed: int) -> tuple[Tensor | None, ...]:
    generator, logits, rows, token_ids, num_tokens, num_prompt_tokens, ahead = _rows(seed)
    each = 12
    edits = torch.full((_ROWS * each, FIXED_COLUMNS + 2), ANY, dtype=torch.int32)
    values = torch.tensor([1.5, -2.25, -torch.inf])
    edits[:, 0] = torch.cat([torch.randperm(logits.shape[1], generator=generator)[:each] for _ in range(_ROWS)]).int()
    edits[:, 1] = values[torch.randint(3, (len(edits),), generator=generator)].view(torch.int32)
    edits[:, 2] = torch.randint(1, 60, (len(edits),), generator=generator).int()
    edits[:, 3] = torch.randint(0, 3, (len(edits),), generator=generator).int()
    rest = (num_tokens - 1).repeat_interleave(each)
    ends = token_ids[torch.arange(_ROWS).repeat_interleave(each), rest]
    chooses = torch.rand(len(edits), generator=generator) < 0.4
    edits[chooses, FIXED_COLUMNS] = ends[chooses]
    starts = torch.arange(_ROWS, dtype=torch.int32) * each
    counts = torch.randint(0, each + 1, (_ROWS,), generator=generator).int()
    counts[rows[0]] = each
    return logits, rows, edits, starts, counts, token_ids, num_tokens, num_prompt_tokens, ahead


def generate_penalties(seed: int) -> tuple[Tensor | None, ...]:
    generator, logits, rows, token_ids, num_tokens, num_prompt_tokens, ahead = _rows(seed)
    choices = torch.tensor([[0.0, 0.5, -0.25], [0.0, 0.25, 1.5], [1.0, 1.25, 0.5]])
    penalties = choices.gather(1, torch.randint(3, (3, _ROWS), generator=generator))
    penalties[2, rows[0]] = 1.25
    return logits, rows, penalties, token_ids, num_tokens, num_prompt_tokens, ahead


INPUTS = {"edit_logits": generate_edits, "penalize": generate_penalties}
