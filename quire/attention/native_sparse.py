"""Sparse latent attention through the native CPU library: each token attends to the keys that an indexer selects.

To attention a token is then a row of its own, with blocks of one key each, in the order of their positions: a context
no longer than top-k gives the bits of dense attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, Rotation, Written
from quire.attention.cpu_native import KV_TYPES, SCALE_BYTES, NativeMetadata
from quire.attention.latent import IndexInputs, LatentWeights
from quire.attention.native_latent import NativeLatentAttention
from quire.kernels.cpu import library
from quire.kernels.cpu.index import select_rows
from quire.kernels.cpu.latent import per_head
from quire.kernels.cpu.tracing import empty
from quire.parallel.groups import ContextShare


class NativeSparseAttention(NativeLatentAttention):
    num_scales = 2  # of the index key, then of the latent

    def share_context(self, share: ContextShare) -> None:
        AttentionBackend.share_context(self, share)  # an indexer selects among the keys of all tokens

    def workspace_bytes(self, spec: AttentionSpec, max_model_len: int, itemsize: int) -> int:
        # And scores of twice as many tokens as there are threads, for all keys.
        return super().workspace_bytes(spec, max_model_len, itemsize) + 8 * library.num_threads() * max_model_len

    def write_index(
        self, spec: AttentionSpec, index: IndexInputs, rotation: Rotation, cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(metadata, NativeMetadata)
        tokens, heads, dim = index.query.shape
        query, weights, keys = empty(tokens, heads, dim), empty(tokens, heads), _keys(spec, cache)
        cos, sin = (None, None) if rotation is None else (part.data_ptr() for part in rotation)
        self._kernels.prepare_index(
            index.query.data_ptr(),
            index.query.stride(0),
            index.key.data_ptr(),
            index.key.stride(0),
            index.weights.data_ptr(),
            index.weights.stride(0),
            cos,
            sin,
            metadata.slots,
            query.data_ptr(),
            weights.data_ptr(),
            keys.data_ptr(),
            tokens,
            metadata.batch.num_tokens,
            heads,
            dim,
            0 if rotation is None else rotation[0].shape[-1],
            keys.stride(1) * keys.element_size(),
            keys.shape[2] * keys.element_size(),
            KV_TYPES[cache.dtype],
        )
        return query, weights

    def attend_latent(
        self,
        spec: AttentionSpec,
        weights: LatentWeights,
        written: Written,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, NativeMetadata)
        assert spec.top_k is not None
        assert written.of_index is not None
        batch = metadata.batch
        if batch.max_context <= spec.top_k:
            return super().attend_latent(spec, weights, written, cache, metadata)
        lists = (batch.tables, batch.rows, batch.contexts, batch.query_starts)
        found = select_rows(*written.of_index, _keys(spec, cache), *lists, spec.top_k)
        rows = tuple(part.data_ptr() for part in (found.slots, found.lines, found.counts, found.firsts))
        out = self._attended(spec, written.query, cache, rows, written.query.shape[0], spec.top_k, 1)
        return per_head(out, weights.value_up).flatten(1)


def _keys(spec: AttentionSpec, cache: Tensor) -> Tensor:
    """The index keys of a cache; int8 ones with their scales."""
    width = spec.index_dim + (SCALE_BYTES if cache.dtype == torch.int8 else 0)
    return cache[..., spec.head_dim : spec.head_dim + width]
