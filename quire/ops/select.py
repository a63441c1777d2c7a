"""Rows and columns of tensors, and rows of tables, of which a rank may hold only a range of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [n, ...] at indices [m] int64: [m, ...]."""
    return x.index_select(0, indices)


GATHER_ROWS = Op(gather_rows, 0.0, triton("gather"), native())


def take_columns(x: Tensor, first: int, width: int) -> Tensor:
    """x [n, ...] at columns [first, first + width), contiguous."""
    return x[:, first : first + width].contiguous()


TAKE_COLUMNS = Op(take_columns, 0.0, native())


def join_columns(first: Tensor, second: Tensor) -> Tensor:
    """Two matrices [n, a] and [n, b] side by side: [n, a + b]."""
    return torch.cat((first, second), dim=-1)


JOIN_COLUMNS = Op(join_columns, 0.0, native())


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """table: [vocab, hidden]; token_ids: [n] int64 or int32. Returns [n, hidden]."""
    return table.index_select(0, token_ids)


EMBED = Op(embed, 0.0, triton("gather", function="gather_rows"), native())


def embed_from(embeds: Tensor, encoded: Tensor, sources: Tensor) -> Tensor:
    """Embeddings [n, hidden] whose token i is encoded[sources[i]] where sources [n] int64 is not negative.

    encoded: [m, hidden], at least one, what an encoder made of an image or the like.
    """
    return torch.where((sources >= 0).unsqueeze(1), encoded[sources.clamp(min=0)], embeds)


EMBED_FROM = Op(embed_from, 0.0)


def tokens_in_range(token_ids: Tensor, first: int, size: int) -> Tensor:
    """Where to look tokens up in a table that holds [first, first + size); row 0 for those that it does not hold."""
    local = token_ids.long() - first
    return local.masked_fill_((local < 0) | (local >= size), 0)


def clear_outside_range(token_ids: Tensor, rows: Tensor, first: int, size: int) -> Tensor:
    """`rows` [n, hidden], of tokens outside [first, first + size) as zeros. Changes them in place."""
    outside = (token_ids < first) | (token_ids >= first + size)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


TOKENS_IN_RANGE = Op(tokens_in_range, 0.0, native())
CLEAR_OUTSIDE_RANGE = Op(clear_outside_range, 0.0, native(), changes=(1,))
