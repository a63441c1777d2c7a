"""Inputs of the ops in quire/ops/step.py."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS, _LENGTH, _BLOCK = 9, 64, 8


def _state(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(1 << 17, (_ROWS, _LENGTH), generator=generator).int()
    num_computed = torch.randint(_LENGTH, (_ROWS,), generator=generator)
    tables = torch.randint(1, 500, (1 + seed % 3, _ROWS, _LENGTH // _BLOCK), generator=generator).int()
    return generator, token_ids, num_computed, tables


def generate_decode(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    generator, token_ids, num_computed, tables = _state(seed)
    rows = torch.randperm(_ROWS, generator=generator)[: 1 + seed % 8]
    return rows, token_ids, num_computed, tables, _BLOCK


def generate_mixed(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    generator, token_ids, num_computed, tables = _state(seed)
    count = 1 + seed % 8
    rows = torch.randperm(_ROWS, generator=generator)[:count]
    contexts = torch.randint(1, _LENGTH + 1, (count,), generator=generator)
    counts = (torch.rand(count, generator=generator) * contexts).long() + 1
    counts[1:2] = 0  # padding
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return rows, contexts.int(), starts, token_ids, num_computed, tables, _BLOCK, int(starts[-1]) + 3 * seed


def generate_sampling(seed: int) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(_ROWS, generator=generator)[: 1 + seed % 8]
    table = torch.rand(4, _ROWS, generator=generator, dtype=torch.float64)
    seeds, tokens, prompt = torch.randint(1 << 40, (3, _ROWS), generator=generator).unbind(0)
    ahead = torch.randint(5, rows.shape, generator=generator).int() if seed % 2 else None
    return rows, table, seeds, tokens + prompt, prompt, ahead


INPUTS = {"gather_decode": generate_decode, "gather_mixed": generate_mixed, "gather_sampling": generate_sampling}
