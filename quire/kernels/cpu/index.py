"""The sparse indexer of latent attention over tensors: float32 activations, on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty

# As kv_cache.h numbers them. The default first: half the memory traffic of float32, and an error of 2^-11 at most.
KV_TYPES = {torch.float16: 1, torch.float32: 0, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class SelectedKeys(NamedTuple):
    """Each token as a row of its own, in the form in which attention reads rows and their tables."""

    slots: Tensor  # [n, top_k] int32
    counts: Tensor  # [n] int32
    lines: Tensor  # [n] int64
    firsts: Tensor  # [2 * n] int32, of which n + 1 count


def select_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    starts: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """See quire/ops/latent.py; query and weights are contiguous."""
    found = select_rows(query, weights, keys, tables, rows, contexts, starts, top_k)
    return found.slots, found.counts


def select_rows(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    starts: Tensor,
    top_k: int,
) -> SelectedKeys:
    """keys [blocks, block_size, dim] of any type of a cache; int8 ones end with the four bytes of a scale."""
    tokens, heads, dim = query.shape
    found = SelectedKeys(
        empty(tokens, top_k, dtype=torch.int32),
        empty(tokens, dtype=torch.int32),
        empty(tokens, dtype=torch.int64),
        empty(tokens, 2, dtype=torch.int32),
    )
    bound().select_keys(
        query.data_ptr(),
        weights.data_ptr(),
        keys.data_ptr(),
        tables.data_ptr(),
        rows.data_ptr(),
        contexts.data_ptr(),
        starts.data_ptr(),
        *(part.data_ptr() for part in found),
        tokens,
        rows.shape[0],
        tables.stride(0),
        keys.stride(1) * keys.element_size(),
        keys.shape[2] * keys.element_size(),
        heads,
        dim,
        top_k,
        keys.shape[1],
        KV_TYPES[keys.dtype],
    )
    return found
