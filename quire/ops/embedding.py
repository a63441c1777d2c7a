"""Embedding ops: rows of a table, where a rank may hold only a range of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table: [vocab, hidden]; token_ids: [n] int64 or int32. Returns [n, hidden]."""
    return table.index_select(0, token_ids)


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(1 + seed % 50, 1 + 5 * seed, generator=generator)
    return table, torch.randint(table.shape[0], (seed % 9,), generator=generator)


EMBED = Op("embed", embed, generate_inputs, 0.0, (Implementation("triton", "triton.gather:gather_rows", ("cuda",)),))


def embed_from(embeds: Tensor, encoded: Tensor, sources: Tensor) -> Tensor:
    """Embeddings [n, hidden] whose token i is encoded[sources[i]] where sources [n] int64 is not negative.

    encoded: [m, hidden], at least one, what an encoder made of an image or the like.
    """
    return torch.where((sources >= 0).unsqueeze(1), encoded[sources.clamp(min=0)], embeds)


def generate_sources(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeds, encoded = (torch.randn(count, 1 + seed, generator=generator) for count in (seed % 9, 1 + seed % 5))
    return embeds, encoded, torch.randint(-1, encoded.shape[0], (seed % 9,), generator=generator)


EMBED_FROM = Op("embed_from", embed_from, generate_sources, 0.0)


def embed_range(look_up: Callable[[Tensor], Tensor], token_ids: Tensor, first: int, size: int) -> Tensor:
    """Rows of a table that holds tokens [first, first + size), looked up from its start; other tokens give zeros."""
    local = token_ids - first
    outside = (local < 0) | (local >= size)
    return look_up(local.masked_fill_(outside, 0)).masked_fill_(outside.unsqueeze(-1), 0)
