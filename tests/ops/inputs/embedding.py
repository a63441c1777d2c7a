"""Inputs of the ops in quire/ops/select.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(1 + seed % 50, 1 + 5 * seed, generator=generator)
    return table, torch.randint(table.shape[0], (seed % 9,), generator=generator)


def generate_sources(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeds, encoded = (torch.randn(count, 1 + seed, generator=generator) for count in (seed % 9, 1 + seed % 5))
    return embeds, encoded, torch.randint(-1, encoded.shape[0], (seed % 9,), generator=generator)


def generate_range(seed: int) -> tuple[Tensor, int, int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(50, (1 + seed % 9,), generator=generator), 5 * (seed % 8), 1 + seed % 20


def generate_rows_in_range(seed: int) -> tuple[Tensor, Tensor, int, int]:
    token_ids, first, size = generate_range(seed)
    return (
        token_ids,
        torch.randn(token_ids.shape[0], 1 + seed, generator=torch.Generator().manual_seed(seed)),
        first,
        size,
    )


INPUTS = {
    "embed": generate_inputs,
    "embed_from": generate_sources,
    "tokens_in_range": generate_range,
    "clear_outside_range": generate_rows_in_range,
}
