"""Inputs of the ops in quire/ops/latent.py."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Rows of several lengths with padding behind them; small integers, so that sums are exact and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    queries, contexts = ([1, 5, 1], [70, 9, 3]) if seed % 2 else ([2, 1, 40], [33, 1, 130])
    heads, dim, size = (1, 4, 9, 16)[seed % 4], 16 * (1 + seed % 3), 16
    tokens, num_blocks = sum(queries) + seed % 3, 40

    def small(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    tables = 1 + torch.randperm(num_blocks - 1, generator=generator)[:36].view(4, 9).to(torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    keys = small(num_blocks, size, dim + 8)[..., 8:]
    batch = tables, torch.tensor([2, 0, 3]), torch.tensor(contexts, dtype=torch.int32), starts
    return small(tokens, heads, dim), small(tokens, heads) / 4, keys, *batch, (8, 32, 50)[seed % 3]


def fp8_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """The same with keys of an fp8 cache, whose scales are one half, one or two."""
    query, weights, keys, *rest = generate_inputs(seed)
    exponents = torch.randint(62, 65, (*keys.shape[:2], 1), generator=torch.Generator().manual_seed(seed))
    kept = torch.cat((keys.to(torch.float8_e4m3fn).view(torch.uint8), exponents.to(torch.uint8)), -1)
    tables, rows, contexts, starts, top_k = rest
    return query, weights, kept.view(torch.float8_e4m3fn), tables, rows, contexts, starts, top_k


INPUTS = {"select_keys": generate_inputs}
