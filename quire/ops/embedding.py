"""Embedding ops: rows of a table, where a rank may hold only a range of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table: [vocab, hidden]; token_ids: [n] int64 or int32. Returns [n, hidden]."""
    return table.index_select(0, token_ids)


EMBED = Op("embed", embed, 0.0, (triton("gather_rows", "gather"), native("embed")))


def embed_from(embeds: Tensor, encoded: Tensor, sources: Tensor) -> Tensor:
    """Embeddings [n, hidden] whose token i is encoded[sources[i]] where sources [n] int64 is not negative.

    encoded: [m, hidden], at least one, what an encoder made of an image or the like.
    """
    return torch.where((sources >= 0).unsqueeze(1), encoded[sources.clamp(min=0)], embeds)


EMBED_FROM = Op("embed_from", embed_from, 0.0)


def tokens_in_range(token_ids: Tensor, first: int, size: int) -> Tensor:
    """Where to look tokens up in a table that holds [first, first + size); row 0 for those that it does not hold."""
    local = token_ids.long() - first
    return local.masked_fill_((local < 0) | (local >= size), 0)


def clear_outside_range(token_ids: Tensor, rows: Tensor, first: int, size: int) -> Tensor:
    """`rows` [n, hidden], of tokens outside [first, first + size) as zeros. Changes them in place."""
    outside = (token_ids < first) | (token_ids >= first + size)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


TOKENS_IN_RANGE = Op("tokens_in_range", tokens_in_range, 0.0, (native("tokens_in_range"),))
CLEAR_OUTSIDE_RANGE = Op(
    "clear_outside_range", clear_outside_range, 0.0, (native("clear_outside_range"),), changes=(1,)
)
